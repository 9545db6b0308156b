// Files to take away: a picture of what is seen, with its caption, and what the server makes for QuPath.

import { setFont, text } from "./painting.js";

const LINE = 20; // CSS pixels

/** panes: [{ canvas, title }]; caption: words below them. */
export function picture(panes, caption) {
  const ratio = window.devicePixelRatio || 1;
  const gap = 8 * ratio;
  const width = panes.reduce((sum, pane) => sum + pane.canvas.width, gap * (panes.length - 1));
  const height = Math.max(...panes.map((pane) => pane.canvas.height));
  const sheet = document.createElement("canvas");
  const context = sheet.getContext("2d");
  setFont(context, ratio, 12.5);
  const lines = broken(context, caption, width - 2 * gap);
  const [head, foot] = [1.6 * LINE * ratio, (lines.length + 0.6) * LINE * ratio];
  [sheet.width, sheet.height] = [width, head + height + foot];
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, sheet.width, sheet.height);
  let left = 0;
  for (const pane of panes) {
    setFont(context, ratio, 14, 600);
    text(context, pane.title, left + 8 * ratio, head / 2, "#1d2733");
    context.drawImage(pane.canvas, left, head);
    left += pane.canvas.width + gap;
  }
  setFont(context, ratio, 12.5);
  lines.forEach((line, i) => {
    text(context, line, 8 * ratio, head + height + (i + 0.8) * LINE * ratio, "#1d2733");
  });
  return new Promise((resolve) => { sheet.toBlob(resolve, "image/png"); });
}

/** Lines that fit into a width. */
function broken(context, words, width) {
  const lines = [""];
  for (const word of words.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (lines.at(-1) && context.measureText(longer).width > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
