// What is known of the slide and of the chosen tile, in words and numbers.

import { tilePicture } from "./api.js";
import { bar, element } from "./elements.js";
import { plain } from "./painting.js";
import { shown } from "./slide_list.js";

/** "K = 3.2 tile steps (358 µm)" */
export function radiusWords(head) {
  const um = head.radius_um === null || head.radius_um === undefined ? "" : ` (${plain(head.radius_um)} µm)`;
  return `K = ${plain(head.radius_steps)} tile steps${um}`;
}

/** listed: the slide as the list has it; slide: its details; models: those shown, each once. */
export function fillSlideFacts(place, listed, slide, models) {
  const facts = [`${slide.n.toLocaleString("en")} tiles`];
  if (slide.mpp) facts.push(`${plain(slide.mpp)} µm per pixel`);
  if (!slide.has_image) facts.push("no image: tiles alone");
  place.replaceChildren(
    element("h2", { class: "slide-name" }, slide.name),
    element("p", { class: "quiet" }, facts.join(" · ")),
    ...models.map((model) => prediction(listed, model, models.length > 1)),
  );
}

function prediction(listed, model, named) {
  const own = listed.by_model?.[model.id] ?? listed;
  const words = element("p", { class: "prediction" });
  if (named) words.append(element("span", { class: "quiet" }, model.name), element("br"));
  const strong = (outcome) => element("strong", {}, shown(outcome));
  words.append("Predicted ", strong(own.predicted), " · truth ", strong(listed.truth));
  if (own.wrong === true) words.append(" · ", element("strong", { class: "wrong" }, "wrong"));
  const told = (line) => words.append(element("span", { class: "quiet block" }, line));
  if (own.fold !== null && own.fold !== undefined) told(`by the model of fold ${own.fold}, which did not train on it`);
  if (model.note) told(model.note);
  const values = Object.entries(model.values ?? own.values ?? {});
  const shares = values.every(([, value]) => value >= 0 && value <= 1);
  const rows = values.map(([name, value]) => {
    const label = name.replace(/^prob_/, "");
    return element(
      "li", { class: label === shown(listed.truth) ? "true-class" : null },
      element("span", {}, label), shares ? bar(value, `${label} ${plain(value)}`) : element("span"),
      element("span", { class: "number" }, shares ? value.toFixed(3) : plain(value)),
    );
  });
  return element("div", { class: "by-model" }, words, element("ul", { class: "classes" }, ...rows));
}

const KINDS = { map: "Map", posterior: "Posterior", prior: "Prior", likelihood: "Likelihood" };
const MEANINGS = {
  map: "Colours show the score of every tile.",
  posterior: "Colours show how much the chosen tile takes from each tile around it: prior × likelihood.",
  prior: "Colours show the share that distance alone would give.",
  likelihood: "Colours show the share that likeness of the tiles alone would give.",
};

/** tile: what the server tells of it; null while it loads. choose({row, head, tile}) changes the view. */
export function fillTileFacts(place, { slide, model, overlay, tile, state, choose }) {
  const title = element("h2", {}, state.tile === null ? "Tile" : `Tile ${state.tile}`);
  if (state.tile === null) {
    const hint = "Click a tile to see its scores and what each head takes from its surroundings.";
    place.replaceChildren(title, element("p", { class: "quiet" }, hint));
    return;
  }
  const leave = { type: "button", class: "leave", "aria-label": "Leave the tile", title: "Leave the tile (Esc)" };
  title.append(element("button", { ...leave, onclick: () => choose({ tile: null }) }, "×"));
  const parts = [title];
  const about = element("div", { class: "about-tile" });
  if (slide.has_image) {
    const alt = `Tile ${state.tile} and a margin around it`;
    const picture = element("img", { class: "thumbnail", src: tilePicture(slide.id, state.tile), alt });
    picture.addEventListener("error", () => picture.remove());
    about.append(picture);
  }
  parts.push(about);
  if (tile === null) about.append(element("p", { class: "quiet" }, "Loading the tile …"));
  else {
    const [key, percentile] = [state.layer, percentileOf(overlay, tile, state.layer)];
    const { label } = model.layers.find((layer) => layer.key === key);
    const at = `${UNITS[slide.unit]} ${tile.x.toLocaleString("en")}, ${tile.y.toLocaleString("en")}`;
    about.append(element(
      "p", {}, capital(label), element("br"), element("strong", {}, plain(tile.scores[key])), element("br"),
      `percentile ${percentile.toFixed(1)}`, element("br"), element("span", { class: "quiet" }, at),
    ));
    if (tile.heads.length) parts.push(...surroundings(tile, state, choose));
    else parts.push(element("p", { class: "quiet" }, "This model has no heads: a tile has its score alone."));
    if (model.layers.length > 1) parts.push(element("h3", {}, "Its scores"), scores(model, overlay, tile, state));
  }
  const { name, value } = place.contains(document.activeElement) ? document.activeElement : {};
  place.replaceChildren(...parts);
  if (name) place.querySelector(`input[name="${name}"][value="${value}"]`)?.focus(); // who uses keys goes on from here
}

const UNITS = { px0: "at pixel", px: "at", um: "at µm", steps: "at step" };
const capital = (words) => words.charAt(0).toUpperCase() + words.slice(1);

const percentileOf = (overlay, tile, key) => {
  const layer = overlay.layers.get(key);
  return layer.percentiles[layer.values[tile.index]];
};

function scores(model, overlay, tile, state) {
  const column = (name) => element("th", { scope: "col" }, name);
  const rows = model.layers.map(({ key, label }) => element(
    "tr", { class: key === state.layer ? "current" : null },
    element("th", { scope: "row" }, label), element("td", {}, plain(tile.scores[key])),
    element("td", {}, percentileOf(overlay, tile, key).toFixed(1)),
  ));
  const head = element("tr", {}, column(""), column("raw"), column("percentile"));
  return element("table", { class: "scores" }, element("thead", {}, head), element("tbody", {}, ...rows));
}

const legend = (words) => element("legend", { class: "unseen" }, words);
const radio = (name, value, checked, onchange) => element("input", { type: "radio", name, value, checked, onchange });

function surroundings(tile, state, choose) {
  const kinds = Object.entries(KINDS).map(([kind, label]) => element(
    "label", {},
    radio("row", kind, kind === state.row, () => choose({ row: kind })),
    element("span", {}, label),
  ));
  const spread = (head) => `spreads over ${plain(head.perplexity)} tiles`;
  const heads = tile.heads.map((head, i) => element(
    "label", { class: i === state.head ? "head current" : "head" },
    radio("head", i, i === state.head, () => choose({ head: i, row: state.row === "map" ? "posterior" : state.row })),
    element("span", { class: "head-name" }, head.name),
    element("span", { class: "head-facts" }, radiusWords(head), element("br"), spread(head)),
  ));
  const head = tile.heads[state.head];
  const share = head ? `${(100 * head.shown_share).toFixed(1)} % of the posterior` : "";
  const part = head && head.shown_share < 0.9995
    ? ` The strongest ${head.neighbours.length} tiles are coloured; they hold ${share}.` : "";
  return [
    element("h3", {}, "What this tile looks at"),
    element("fieldset", { class: "choice four" }, legend("Colours on the slide"), ...kinds),
    element("p", { class: "quiet" }, MEANINGS[state.row] + part),
    element("fieldset", { class: "heads" }, legend("Head"), ...heads),
  ];
}
