// What a user chose, in the address of the page: reloading or sharing it restores the view.

const DEFAULTS = {
  slide: "", model: "", layer: "", mode: "percentile", threshold: 0, opacity: 0.6, labels: true,
  tile: null, head: 0, row: "posterior", compare: "", sort: "name", filter: "", x: null, y: null, zoom: null,
};
const ONE_OF = {
  mode: ["percentile", "raw"],
  row: ["map", "posterior", "prior", "likelihood"],
  sort: ["name", "confidence", "error", "truth"],
};
const LIMITS = {
  threshold: [0, 100], opacity: [0, 1], tile: [0, 1e9], head: [0, 1e6],
  x: [-1e12, 1e12], y: [-1e12, 1e12], zoom: [1e-9, 1e9],
};

/** The state that an address says; what it does not say, or says wrongly, is as at the start. */
export function readState(hash) {
  const state = { ...DEFAULTS };
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!(key in DEFAULTS)) continue;
    if (key in LIMITS) {
      const number = Number(text);
      const [low, high] = LIMITS[key];
      if (text !== "" && number >= low && number <= high) state[key] = number;
    } else if (key in ONE_OF) {
      if (ONE_OF[key].includes(text)) state[key] = text;
    } else {
      state[key] = typeof DEFAULTS[key] === "boolean" ? text === "1" : text;
    }
  }
  return state;
}

/** The address of a state, without what is as at the start. */
export function writeState(state) {
  const said = new URLSearchParams();
  for (const key of Object.keys(DEFAULTS)) {
    const value = state[key];
    if (value === DEFAULTS[key] || value === null) continue;
    if (typeof value === "boolean") said.set(key, Number(value));
    else said.set(key, typeof value === "number" ? Number(value.toPrecision(9)) : value);
  }
  return `#${said.toString().replaceAll("%40", "@")}`;
}
