// The page: keeps what a user chose, fetches what it needs, and has the panes and panels show it.

import { getGeojson, getLabels, getOverlay, getRun, getSlide, getTile } from "./api.js";
import { picture, save } from "./export.js";
import { Overlay, rowColours } from "./overlay.js";
import { Sheet, outlinePath, plain } from "./painting.js";
import { Pane } from "./pane.js";
import { fillSlideFacts, fillTileFacts, radiusWords } from "./side_panel.js";
import { fillList, markCurrent, shown, sortedSlides } from "./slide_list.js";
import { readState, writeState } from "./state.js";

const at = (id) => document.getElementById(id);
const handlers = { moved, picked, chosen, retried: () => show(true) };
const REMINDER = "Attention shows what a model weighed. It is not a diagnosis. For research use only.";

let state = readState(location.hash);
let run = null;
let listed = []; // slides as the list has them now
let slide = null; // that is shown
let kept = new Map(); // promises of what belongs to the slide, by what it is
const panes = [];

// ---- what is shown where -------------------------------------------------------------------------------------------

/** [{ model, layer }] of the panes, from what was chosen and what there is. */
function choices() {
  const of = (model, key) => {
    const known = slide.models.find(({ id }) => id === model) ?? slide.models[0];
    return { model: known, layer: known.layers.find((layer) => layer.key === key) ?? known.layers[0] };
  };
  const first = of(state.model, state.layer);
  if (!state.compare) return [first];
  const [key, model] = state.compare.split("@");
  return [first, of(model, key)];
}

/** The index of the head that a layer is of; null for others. */
function headOf(key) {
  const found = /^head-(\d+)$/.exec(key);
  return found ? Number(found[1]) : null;
}

/** What is asked for once and kept while the slide is shown; what failed is asked for again. */
function once(what, ask) {
  if (!kept.has(what)) kept.set(what, ask().catch((error) => { kept.delete(what); throw error; }));
  return kept.get(what);
}

const overlayOf = (model) => once(`overlay ${model.id}`, async () => {
  const overlay = new Overlay(await getOverlay(slide.id, model.id), slide.tile_size);
  return { overlay, sheets: [new Sheet(overlay), new Sheet(overlay)] };
});
const labelsOf = (current) => once("labels", () => getLabels(current.id));
const tileOf = (model) => once(`tile ${state.tile} ${model.id}`, () => getTile(slide.id, state.tile, model.id));

/** Fetches and shows all of the state. Another call while this one waits takes over. */
let turn = 0;
async function show(afterError = false) {
  const mine = ++turn;
  const begun = performance.now();
  const stale = () => mine !== turn;
  arrangePanes(state.compare ? 2 : 1);
  try {
    const known = run.slides.find(({ id }) => id === state.slide);
    if (!known) {
      const none = "There are no slides.";
      tell(run.slides.length ? "This address names a slide that is not here. Choose one from the list." : none);
      return;
    }
    markCurrent(at("slide-list"), known.id);
    document.title = `${known.name} · psamil viewer`;
    if (slide?.id !== known.id || afterError) {
      tell("Loading the slide …");
      if (slide?.id !== known.id) [slide, kept] = [null, new Map()];
      const found = await getSlide(known.id);
      if (stale()) return;
      slide = found;
      const place = state.zoom === null ? null : { x: state.x, y: state.y, zoom: state.zoom };
      await Promise.all(panes.map((pane) => pane.open(slide, place)));
    }
    for (const pane of panes) if (pane.slide !== slide) await pane.open(slide, panes[0].place);
    if (stale()) return;
    if (panes.length > 1) lead(panes[0]);
    const wanted = choices();
    fillChoices(wanted);
    const models = [...new Set(wanted.map(({ model }) => model))];
    fillSlideFacts(at("slide-facts"), known, slide, models);
    at("display").hidden = false;
    if (models.some((model) => !kept.has(`overlay ${model.id}`))) tell("Computing what the model looks at …");
    const overlays = await Promise.all(wanted.map(({ model }) => overlayOf(model)));
    const labels = slide.labels ? await labelsOf(slide) : null;
    if (stale()) return;
    tell("");
    if (state.tile !== null && state.tile >= slide.n) state.tile = null;
    const asked = state.tile === null || models.every((model) => kept.has(`tile ${state.tile} ${model.id}`));
    if (!asked || state.tile === null) drawPanes(wanted, overlays, labels, null);
    if (state.tile !== null) {
      const tiles = await Promise.all(wanted.map(({ model }) => tileOf(model)));
      if (stale()) return;
      drawPanes(wanted, overlays, labels, tiles);
    }
    if (!performance.getEntriesByName("first-draw").length) performance.measure("first-draw", { start: begun });
    performance.measure("show", { start: begun });
  } catch (error) {
    if (!stale()) tell(error.message, true);
  }
}

function tell(words, canRetry) {
  for (const pane of panes) pane.tell(words, canRetry);
  if (words) at("status").textContent = words;
}

/** Draws from what is there: no request. */
function drawPanes(wanted, overlays, labels, tiles) {
  const umPerUnit = { px0: slide.mpp, um: 1 }[slide.unit] ?? null;
  wanted.forEach(({ model, layer }, i) => {
    const { overlay, sheets } = overlays[i];
    const sheet = sheets[i];
    const tile = tiles?.[i] ?? null;
    const head = i ? headOf(layer.key) ?? state.head : state.head;
    const row = state.row !== "map" ? tile?.heads[head] : null;
    const scores = overlay.layers.get(layer.key);
    let legend;
    if (row) {
      const { colours, low, high } = rowColours(overlay.n, row.neighbours, row[state.row]);
      sheet.paint(colours);
      legend = { title: `${state.row} of ${row.name}, from the tile`, low, high, from: 0 };
    } else {
      sheet.paint(scores.colours(state.mode, state.threshold));
      const raw = state.mode === "raw";
      const [low, high] = raw ? [scores.low, scores.high] : [0, 100];
      const lowest = state.threshold > 0 ? scores.rawAt(state.threshold) : low;
      const from = raw ? (lowest - low) / (high - low || 1) : state.threshold / 100;
      legend = { title: `${layer.label}, ${raw ? "raw" : "percentile"}`, low, high, from };
    }
    const circles = (tile?.heads ?? []).map((each, index) => ({
      radius: each.radius_steps * stepOf(overlay), label: `${each.name}: ${radiusWords(each)}`, chosen: index === head,
    }));
    const chosen = state.tile === null ? null : { corner: overlay.corner(state.tile), size: overlay.size, circles };
    const outlines = labels && state.labels ? outlinesOf(overlay, labels) : null;
    const description = `Slide ${slide.name}, ${legend.title}, by ${model.name}`;
    panes[i].show({ sheet, opacity: state.opacity, outlines, tile: chosen, legend, umPerUnit, description });
    panes[i].title = `${slide.models.length > 1 ? `${model.name} · ` : ""}${legend.title}`;
  });
  fillDisplay(overlays[0].overlay.layers.get(wanted[0].layer.key), labels);
  const tile = tiles?.[0] ?? null;
  const facts = at("tile-facts");
  const [{ model, layer }, { overlay }] = [wanted[0], overlays[0]];
  fillTileFacts(facts, { slide, model, overlay, tile, state: { ...state, layer: layer.key }, choose: change });
  if (tile && facts.dataset.tile !== String(tile.index)) {
    const panel = facts.parentElement;
    panel.scrollTo({ top: facts.offsetTop - panel.offsetTop - 14 });
  }
  facts.dataset.tile = tile ? tile.index : "";
  at("status").textContent = panes.map((pane) => pane.picture.description).join("; ");
}

const stepOf = (overlay) => slide.step ?? overlay.size;

function outlinesOf(overlay, labels) {
  overlay.outlines ??= outlinePath(overlay, labels);
  return overlay.outlines;
}

// ---- controls ------------------------------------------------------------------------------------------------------

function fillChoices(wanted) {
  wanted.forEach(({ model, layer }, i) => {
    const pane = panes[i];
    const option = (value, label, chosen) => new Option(label, value, chosen, chosen);
    pane.model.replaceChildren(...slide.models.map(({ id, name }) => option(id, name, id === model.id)));
    pane.model.parentElement.hidden = false;
    pane.model.hidden = slide.models.length < 2;
    pane.layer.replaceChildren(...model.layers.map((each) => {
      const head = model.heads[headOf(each.key) ?? -1];
      return option(each.key, head ? `${head.name} · ${radiusWords(head)}` : each.label, each.key === layer.key);
    }));
  });
  at("compare").setAttribute("aria-pressed", String(wanted.length > 1));
}

function fillDisplay(layer, labels) {
  for (const input of document.querySelectorAll("input[name=mode]")) input.checked = input.value === state.mode;
  at("threshold").value = state.threshold;
  const raw = plain(layer.rawAt(state.threshold));
  at("threshold-value").textContent = state.threshold > 0 ? `${plain(state.threshold)} (raw ${raw})` : "none hidden";
  at("opacity").value = Math.round(100 * state.opacity);
  at("opacity-value").textContent = `${Math.round(100 * state.opacity)} %`;
  at("labels-row").hidden = labels === null;
  at("labels").checked = state.labels;
}

function fillSlides() {
  listed = sortedSlides([...run.slides], state.sort, state.filter);
  fillList(at("slide-list"), listed, (id) => change({ slide: id, tile: null, x: null, y: null, zoom: null }));
  const all = run.slides.length;
  const count = `${listed.length === all ? "" : `${listed.length} of `}${all} slides: truth → predicted`;
  const none = all ? "No slide matches the filter." : "There are no slides.";
  at("slide-count").textContent = listed.length ? count : none;
  markCurrent(at("slide-list"), state.slide);
  [at("filter").value, at("sort").value] = [state.filter, state.sort];
}

/** Changes what was chosen, and shows it. Another slide is a step that the browser's Back undoes. */
function change(changes) {
  const another = "slide" in changes && changes.slide !== state.slide;
  if ("layer" in changes) {
    const head = headOf(changes.layer);
    if (head !== null) changes.head = head;
  }
  Object.assign(state, changes);
  writeAddress(another);
  if ("sort" in changes || "filter" in changes) fillSlides();
  else show();
}

function writeAddress(another = false) {
  const address = writeState(state);
  if (address === location.hash) return;
  if (another) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

function chosen(pane, changes) {
  if (pane === panes[0]) change(changes);
  else {
    const [, second] = choices();
    const { model = second.model.id, layer = second.layer.key } = changes;
    change({ compare: `${layer}@${model}` });
  }
}

async function picked(pane, x, y) {
  const { model } = choices()[panes.indexOf(pane)];
  const { overlay } = await overlayOf(model);
  const tile = overlay.tileAt(x, y);
  if (tile === state.tile) return;
  change({ tile });
}

/** Other panes show the same place. */
function lead(pane) {
  for (const other of panes) {
    other.leads = other === pane;
    if (other === pane || other.slide !== pane.slide) continue;
    other.moveTo(pane.place);
    other.whole = pane.whole;
  }
}

let writing = null;
function moved(pane) {
  if (!pane.leads) return;
  lead(pane);
  clearTimeout(writing);
  writing = setTimeout(() => {
    if (!pane.slide || pane.slide !== slide) return;
    Object.assign(state, pane.whole ? { x: null, y: null, zoom: null } : pane.place);
    writeAddress();
  }, 250);
}

function arrangePanes(count) {
  at("stages").classList.toggle("two", count === 2);
  while (panes.length > count) panes.pop().remove();
  while (panes.length < count) panes.push(new Pane(at("stages"), handlers));
  if (!panes.some((pane) => pane.leads)) panes[0].leads = true;
}

function compare() {
  if (!slide) return;
  if (state.compare) return change({ compare: "" });
  const [{ model, layer }] = choices();
  const others = slide.models.filter(({ id }) => id !== model.id);
  const other = others[0] ?? model;
  const next = model.layers[(model.layers.indexOf(layer) + 1) % model.layers.length];
  const same = other.layers.find(({ key }) => key === layer.key) ?? other.layers[0];
  change({ compare: `${(other === model ? next : same).key}@${other.id}` });
}

function step(by) {
  if (!listed.length) return;
  const now = listed.findIndex(({ id }) => id === state.slide);
  const next = now < 0 ? 0 : Math.min(Math.max(now + by, 0), listed.length - 1);
  if (next !== now) change({ slide: listed[next].id, tile: null, x: null, y: null, zoom: null });
}

function nextModel() {
  const [{ model }] = choices();
  change({ model: slide.models[(slide.models.indexOf(model) + 1) % slide.models.length].id });
}

// ---- files ---------------------------------------------------------------------------------------------------------

function fileName(ending) {
  const seen = choices().map(({ model, layer }) => `${model.name}-${layer.label}`).join("-and-");
  return `${slide.name}-${seen}.${ending}`.replace(/[^\w.-]+/g, "_");
}

async function exportPicture() {
  if (!panes[0]?.picture) return;
  const known = run.slides.find(({ id }) => id === slide.id);
  const said = choices().map(({ model }) => {
    const { predicted } = known.by_model?.[model.id] ?? known;
    return `${slide.models.length > 1 ? `${model.name} ` : ""}predicted ${shown(predicted)}`;
  });
  const hidden = state.threshold > 0 ? `Tiles below percentile ${plain(state.threshold)} are hidden. ` : "";
  const lines = state.labels && slide.labels ? "Lines surround annotated tiles. " : "";
  const outcome = `${slide.name}: truth ${shown(known.truth)}; ${[...new Set(said)].join("; ")}.`;
  const caption = `${outcome} ${hidden}${lines}${REMINDER}`;
  save(await picture(panes.map((pane) => ({ canvas: pane.snapshot(), title: pane.title })), caption), fileName("png"));
}

async function exportGeojson() {
  if (!panes[0]?.picture) return;
  const [{ model, layer }] = choices();
  try {
    const { blob, name } = await getGeojson(slide.id, model.id, layer.key, state.threshold);
    save(blob, name);
  } catch (error) {
    at("status").textContent = error.message;
    panes[0].tell(`No GeoJSON: ${error.message}`, true);
  }
}

// ---- keys and events -----------------------------------------------------------------------------------------------

function chooseHead(number) {
  if (!slide) return;
  const [{ model }] = choices();
  const layer = model.layers.find(({ key }) => headOf(key) === (number ? number - 1 : null));
  if (layer) change({ layer: layer.key });
}

const KEYS = {
  ArrowLeft: () => step(-1), ArrowUp: () => step(-1), ArrowRight: () => step(1), ArrowDown: () => step(1),
  p: () => change({ mode: state.mode === "raw" ? "percentile" : "raw" }),
  t: () => change({ labels: !state.labels }),
  c: compare, m: () => slide && nextModel(), e: exportPicture, g: exportGeojson,
  "+": () => panes[0]?.zoomBy(1.5), "=": () => panes[0]?.zoomBy(1.5), "-": () => panes[0]?.zoomBy(1 / 1.5),
  f: () => panes[0]?.showWhole(),
  Escape: () => state.tile !== null && change({ tile: null }),
  "/": () => at("filter").focus(), "?": () => at("help").showModal(),
};
const MOVES = { ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, -0.2], ArrowDown: [0, 0.2] };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || at("help").open || !run) return;
  const typing = event.target.closest("input, select, textarea");
  if (typing && event.key !== "Escape") return;
  if (event.shiftKey && MOVES[event.key]) panes[0]?.moveBy(...MOVES[event.key]);
  else if (/^[0-9]$/.test(event.key)) chooseHead(Number(event.key));
  else if (event.key === "Enter" && event.target.closest(".slide")) {
    const pane = panes.find(({ root }) => root.contains(event.target));
    if (pane.slide) picked(pane, pane.place.x, pane.place.y);
  } else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

at("compare").addEventListener("click", compare);
at("export-png").addEventListener("click", exportPicture);
at("export-geojson").addEventListener("click", exportGeojson);
at("open-help").addEventListener("click", () => at("help").showModal());
at("filter").addEventListener("input", (event) => change({ filter: event.target.value }));
at("sort").addEventListener("change", (event) => change({ sort: event.target.value }));
at("threshold").addEventListener("input", (event) => change({ threshold: Number(event.target.value) }));
at("opacity").addEventListener("input", (event) => change({ opacity: Number(event.target.value) / 100 }));
at("labels").addEventListener("change", (event) => change({ labels: event.target.checked }));
for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => change({ mode: input.value }));
}
window.addEventListener("resize", () => panes.forEach((pane) => pane.draw()));
window.addEventListener("popstate", () => {
  const before = state;
  state = readState(location.hash);
  if (!run) return;
  if (state.sort !== before.sort || state.filter !== before.filter) fillSlides();
  if (slide && state.slide === slide.id && state.zoom !== null) panes[0]?.moveTo(state);
  show();
});

async function start() {
  arrangePanes(state.compare ? 2 : 1);
  tell("Loading the run …");
  try {
    run = await getRun();
  } catch (error) {
    handlers.retried = start;
    tell(error.message, true);
    return;
  }
  handlers.retried = () => show(true);
  at("run-title").textContent = run.title;
  if (!state.slide) state.slide = sortedSlides([...run.slides], state.sort, state.filter)[0]?.id ?? "";
  fillSlides();
  show();
}

start();
