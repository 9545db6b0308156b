// The slides of the runs: found by text, sorted by what one looks for.

import { bar, element } from "./elements.js";
import { plain } from "./painting.js";

const byName = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true });
const withoutLast = (key, direction) => (a, b) => {
  if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null);
  return direction * (a[key] - b[key]);
};
const ORDERS = {
  name: () => 0,
  confidence: withoutLast("confidence", 1),
  error: withoutLast("error", -1),
  truth: (a, b) => shown(a.truth).localeCompare(shown(b.truth), "en", { numeric: true }),
};

/** An outcome in words. */
export function shown(outcome) {
  if (outcome === null || outcome === undefined) return "unknown";
  if (typeof outcome === "number") return plain(outcome);
  if (typeof outcome === "object") {
    return Object.entries(outcome).map(([key, value]) => `${key} ${shown(value)}`).join(", ");
  }
  return String(outcome);
}

export function sortedSlides(slides, order, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = slides.filter(({ name, truth, predicted, wrong }) => {
    const said = `${name} ${shown(truth)} ${shown(predicted)} ${wrong ? "wrong" : ""}`.toLowerCase();
    return words.every((word) => said.includes(word));
  });
  return found.sort((a, b) => ORDERS[order](a, b) || byName(a, b));
}

/** Fills the list; choose(id) is called for a slide that is clicked. */
export function fillList(list, slides, choose) {
  list.replaceChildren(...slides.map((slide) => {
    const confidence = slide.confidence === null || slide.confidence === undefined ? null
      : element("span", { class: "confidence" }, slide.confidence.toFixed(2), bar(slide.confidence, "confidence"));
    const verdict = element("span", { class: "verdict" }, `${shown(slide.truth)} → ${shown(slide.predicted)}`);
    if (slide.wrong) verdict.append(" ", element("strong", { class: "wrong" }, "wrong"));
    const title = `truth ${shown(slide.truth)}, predicted ${shown(slide.predicted)}, ${slide.tiles ?? "?"} tiles`;
    const button = element(
      "button", { type: "button", "data-id": slide.id, title, onclick: () => choose(slide.id) },
      element("span", { class: "name" }, slide.name), confidence, verdict,
    );
    return element("li", {}, button);
  }));
}

/** Marks the slide that is shown, and brings it into sight. */
export function markCurrent(list, id) {
  for (const button of list.querySelectorAll("button")) {
    const current = button.dataset.id === id;
    button.toggleAttribute("aria-current", current);
    if (current) {
      button.setAttribute("aria-current", "true");
      button.scrollIntoView({ block: "nearest" });
    }
  }
}
