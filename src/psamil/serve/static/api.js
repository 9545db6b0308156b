// What the server tells, by the addresses that it knows.

async function ask(address) {
  let answer;
  try {
    answer = await fetch(address);
  } catch {
    throw new Error("The server does not answer. Is psamil serve still running?");
  }
  if (answer.ok) return answer;
  let cause = `${answer.status} ${answer.statusText}`;
  if ((answer.headers.get("content-type") ?? "").includes("json")) cause = (await answer.json()).error ?? cause;
  throw new Error(cause);
}

const of = (slide) => `/api/slides/${encodeURIComponent(slide)}`;
const by = (model) => `model=${encodeURIComponent(model)}`;

export const getRun = async () => (await ask("/api/run")).json();
export const getSlide = async (slide) => (await ask(of(slide))).json();
export const getOverlay = async (slide, model) => (await ask(`${of(slide)}/overlay.bin?${by(model)}`)).arrayBuffer();
export const getLabels = async (slide) => new Uint8Array(await (await ask(`${of(slide)}/labels.bin`)).arrayBuffer());
export const getTile = async (slide, tile, model) => (await ask(`${of(slide)}/tiles/${tile}?${by(model)}`)).json();
export const tilePicture = (slide, tile) => `${of(slide)}/tiles/${tile}.jpg`;
export const imageTile = (slide, level, column, row) => `${of(slide)}/image/${level}/${column}_${row}.jpg`;

/** Contents and name of the file for QuPath: all tiles, or regions of those from a percentile on. */
export async function getGeojson(slide, model, layer, percentile) {
  const from = percentile > 0 ? `&threshold_percentile=${percentile}` : "";
  const query = `${by(model)}&layer=${encodeURIComponent(layer)}${from}`;
  const answer = await ask(`${of(slide)}/geojson?${query}`);
  const name = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") ?? "");
  return { blob: await answer.blob(), name: name ? name[1] : "tiles.geojson" };
}
