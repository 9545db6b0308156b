// Tiles, outlines, circles, colour bar and scale bar on a canvas. A frame says where the slide is on it:
// { left, top, scale, width, height, ratio } in device pixels, scale in device pixels per unit of the slide.

import { NOTHING, PALETTE, cssOf, cssOfPixel } from "./colours.js";

const INK = "#1d2733";
const ACCENT = "#0b62b8";
const CHOSEN_CIRCLE = [["#ffffff", 4.5], [ACCENT, 2]]; // colour and width of lines above one another
const OTHER_CIRCLE = [["#ffffffb0", 2.5], ["#5b6875", 1, [4, 4]]];
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

/** The tiles of a slide in colours, ready to be drawn at any zoom. */
export class Sheet {
  constructor(overlay) {
    this.overlay = overlay;
    this.canvas = document.createElement("canvas");
    if (overlay.cells) {
      [this.canvas.width, this.canvas.height] = [overlay.columns, overlay.rows];
      this.image = new ImageData(overlay.columns, overlay.rows);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
  }

  paint(colours) {
    this.colours = colours;
    const { cells } = this.overlay;
    if (!cells) {
      this.order = null;
      return;
    }
    for (let i = 0; i < cells.length; i += 1) this.pixels[i] = cells[i] < 0 ? NOTHING : colours[cells[i]];
    this.canvas.getContext("2d").putImageData(this.image, 0, 0);
  }

  draw(context, frame, opacity) {
    context.save();
    context.globalAlpha = opacity;
    if (this.overlay.cells) this.#drawCells(context, frame);
    else this.#drawSquares(context, frame);
    context.restore();
  }

  #drawCells(context, frame) {
    const { lattice, columns, rows } = this.overlay;
    const cell = lattice.step * frame.scale;
    const left = frame.left + lattice.origin[0] * frame.scale;
    const top = frame.top + lattice.origin[1] * frame.scale;
    // Only cells in sight: a picture enlarged to millions of pixels would lose its exactness.
    const [x0, x1] = inSight(left, cell, frame.width, columns);
    const [y0, y1] = inSight(top, cell, frame.height, rows);
    if (x0 >= x1 || y0 >= y1) return;
    context.imageSmoothingEnabled = false;
    const [across, down] = [x1 - x0, y1 - y0];
    context.drawImage(this.canvas, x0, y0, across, down, left + x0 * cell, top + y0 * cell, across * cell, down * cell);
  }

  /** Squares that overlap cover one another, the higher score above, and then get their opacity together. */
  #drawSquares(context, frame) {
    const { overlay, colours } = this;
    if (!this.order) {
      const place = new Map([...PALETTE].map((pixel, i) => [pixel, i]));
      const shades = Array.from({ length: PALETTE.length }, () => []);
      colours.forEach((pixel, tile) => { if (pixel !== NOTHING) shades[place.get(pixel)].push(tile); });
      this.order = shades;
    }
    [this.canvas.width, this.canvas.height] = [frame.width, frame.height];
    const pen = this.canvas.getContext("2d");
    const side = overlay.size * frame.scale;
    this.order.forEach((tiles, shade) => {
      if (!tiles.length) return;
      pen.fillStyle = cssOfPixel(PALETTE[shade]);
      for (const tile of tiles) {
        const [x, y] = overlay.corner(tile);
        const [left, top] = [frame.left + x * frame.scale, frame.top + y * frame.scale];
        const seen = left < frame.width && top < frame.height && left + side > 0 && top + side > 0;
        if (seen) pen.fillRect(left, top, side, side);
      }
    });
    context.drawImage(this.canvas, 0, 0);
  }
}

function inSight(start, cell, length, count) {
  return [Math.max(0, Math.floor(-start / cell)), Math.min(count, Math.ceil((length - start) / cell))];
}

/** Around the tiles that an annotation covers: a line where its neighbour is none of them. */
export function outlinePath(overlay, labels) {
  const path = new Path2D();
  const side = overlay.size;
  const { cells, columns, rows } = overlay;
  const marked = (column, row) => {
    if (column < 0 || row < 0 || column >= columns || row >= rows) return false;
    const tile = cells[row * columns + column];
    return tile >= 0 && labels[tile] > 0;
  };
  for (let tile = 0; tile < overlay.n; tile += 1) {
    if (!labels[tile]) continue;
    const [x, y] = overlay.corner(tile);
    if (!cells) {
      path.rect(x, y, side, side);
      continue;
    }
    const [column, row] = [overlay.places[2 * tile], overlay.places[2 * tile + 1]];
    const line = (x0, y0, x1, y1) => { path.moveTo(x0, y0); path.lineTo(x1, y1); };
    if (!marked(column, row - 1)) line(x, y, x + side, y);
    if (!marked(column, row + 1)) line(x, y + side, x + side, y + side);
    if (!marked(column - 1, row)) line(x, y, x, y + side);
    if (!marked(column + 1, row)) line(x + side, y, x + side, y + side);
  }
  return path;
}

/** A path in units of the slide, with lines that are as wide at every zoom. */
function strokeOnSlide(context, frame, path, styles) {
  context.save();
  context.translate(frame.left, frame.top);
  context.scale(frame.scale, frame.scale);
  context.lineCap = "square";
  for (const [colour, width, dash] of styles) {
    context.strokeStyle = colour;
    context.lineWidth = (width * frame.ratio) / frame.scale;
    context.setLineDash((dash ?? []).map((part) => (part * frame.ratio) / frame.scale));
    context.stroke(path);
  }
  context.restore();
}

export function drawOutlines(context, frame, path) {
  strokeOnSlide(context, frame, path, [["#ffffff", 3.5], [INK, 1.6]]);
}

/** The chosen tile, and the circle of each head; that of the head shown bears its radius. */
export function drawTile(context, frame, { corner, size, circles }) {
  const [x, y] = corner;
  const centre = [x + size / 2, y + size / 2];
  for (const { radius, chosen } of [...circles].sort((a, b) => a.chosen - b.chosen)) {
    const circle = new Path2D();
    circle.arc(...centre, radius, 0, 2 * Math.PI);
    strokeOnSlide(context, frame, circle, chosen ? CHOSEN_CIRCLE : OTHER_CIRCLE);
  }
  const square = new Path2D();
  square.rect(x, y, size, size);
  strokeOnSlide(context, frame, square, [["#ffffff", 5], [INK, 2]]);
  for (const { radius, label, chosen } of circles) {
    if (!chosen) continue;
    const px = frame.ratio;
    setFont(context, px, 12, 600);
    const width = context.measureText(label).width + 12 * px;
    const middle = frame.left + centre[0] * frame.scale;
    const above = frame.top + (centre[1] - radius) * frame.scale - 26 * px;
    const [left, top] = [clamp(middle - width / 2, 4 * px, frame.width - width - 4 * px), Math.max(above, 4 * px)];
    box(context, px, left, top, width, 20 * px);
    text(context, label, left + 6 * px, top + 10 * px, ACCENT);
  }
}

/** Lower left: how long something is. */
export function drawScaleBar(context, frame, umPerUnit, unit) {
  const px = frame.ratio;
  const perPixel = (umPerUnit ?? 1) / frame.scale;
  const most = perPixel * Math.min(180 * px, frame.width / 4);
  const power = 10 ** Math.floor(Math.log10(most));
  const length = [5, 2, 1].map((factor) => factor * power).find((nice) => nice <= most) ?? power;
  const label = umPerUnit === null ? `${plain(length)} ${unit === "steps" ? "tile steps" : "px"}`
    : length >= 1000 ? `${plain(length / 1000)} mm` : `${plain(length)} µm`;
  const bar = length / perPixel;
  setFont(context, px, 12, 500);
  const width = Math.max(bar, context.measureText(label).width) + 20 * px;
  const [left, top, height] = [12 * px, frame.height - 54 * px, 42 * px];
  box(context, px, left, top, width, height);
  context.fillStyle = INK;
  context.fillRect(left + (width - bar) / 2, top + height - 13 * px, bar, 4 * px);
  context.textAlign = "center";
  text(context, label, left + width / 2, top + 14 * px, INK);
  context.textAlign = "left";
}

/** Lower right: what the colours mean. Legend: { title, low, high, from }; those below the share `from` are hidden. */
export function drawColourBar(context, frame, legend) {
  const px = frame.ratio;
  const length = Math.min(220 * px, frame.width * 0.4);
  setFont(context, px, 12, 500);
  const width = Math.max(length, context.measureText(legend.title).width) + 24 * px;
  const height = 62 * px;
  const [left, top] = [frame.width - width - 12 * px, frame.height - height - 12 * px];
  box(context, px, left, top, width, height);
  text(context, legend.title, left + 12 * px, top + 14 * px, INK);
  const start = left + 12 * px;
  const colours = context.createLinearGradient(start, 0, start + length, 0);
  for (let i = 0; i <= 32; i += 1) colours.addColorStop(i / 32, cssOf(i / 32));
  context.fillStyle = colours;
  context.fillRect(start, top + 26 * px, length, 12 * px);
  if (legend.from > 0) {
    context.fillStyle = "#ffffffd8";
    context.fillRect(start, top + 26 * px, length * legend.from, 12 * px);
    context.fillStyle = INK;
    context.fillRect(start + length * legend.from - px, top + 23 * px, 2 * px, 18 * px);
  }
  context.strokeStyle = "#8b96a1";
  context.lineWidth = px;
  context.strokeRect(start, top + 26 * px, length, 12 * px);
  setFont(context, px, 11, 400);
  for (const share of [0, 0.5, 1]) {
    context.textAlign = ["left", "center", "right"][share * 2];
    text(context, plain(legend.low + (legend.high - legend.low) * share), start + share * length, top + 50 * px, INK);
  }
  context.textAlign = "left";
}

export function setFont(context, ratio, size, weight = 400) {
  context.font = `${weight} ${size * ratio}px ${FONT}`;
}

export function text(context, words, x, y, colour) {
  context.fillStyle = colour;
  context.textBaseline = "middle";
  context.fillText(words, x, y);
}

function box(context, px, left, top, width, height) {
  context.beginPath();
  context.roundRect(left, top, width, height, 4 * px);
  context.fillStyle = "#ffffffe6";
  context.fill();
  context.strokeStyle = "#d5dbe1";
  context.lineWidth = px;
  context.stroke();
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), Math.max(low, high));
}

/** A number as people write it: three digits that count. */
export function plain(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size < 1e-3 || size >= 1e6) return number.toExponential(1).replace("e+", "e");
  return Number(number.toPrecision(3)).toLocaleString("en");
}
