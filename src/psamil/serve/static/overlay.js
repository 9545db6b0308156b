// The tiles of a slide and their scores by one model, from one binary: what is switched without a round trip.

import { NOTHING, PALETTE, pixelOf } from "./colours.js";

const MAGIC = "PSAO1\0";
const LEVELS = 65536; // scores come as 16-bit numbers between the lowest and the highest
const LARGEST_SHEET = 16_000_000; // cells of a lattice that is drawn as one picture
const LARGEST_SIDE = 16_000;

/** One number for each tile. */
class Layer {
  constructor({ key, low, high }, values) {
    Object.assign(this, { key, low, high, values });
  }

  /** (65536,) percentile of every score: 100 r / (n - 1) with its rank r from 0 on; ties share their mean. */
  get percentiles() {
    if (!this.ranks) {
      const count = new Uint32Array(LEVELS);
      for (const value of this.values) count[value] += 1;
      this.ranks = new Float32Array(LEVELS);
      let below = 0;
      for (let value = 0; value < LEVELS; value += 1) {
        this.ranks[value] = (100 * (below + Math.max(count[value] - 1, 0) / 2)) / Math.max(this.values.length - 1, 1);
        below += count[value];
      }
    }
    return this.ranks;
  }

  raw(value) {
    return this.low + ((this.high - this.low) * value) / (LEVELS - 1);
  }

  /** The lowest score that is shown above a percentile. */
  rawAt(percentile) {
    const value = this.percentiles.findIndex((rank) => rank >= percentile);
    return this.raw(value < 0 ? LEVELS - 1 : value);
  }

  /** (n,) colours; tiles below the percentile have none. */
  colours(mode, threshold) {
    const { percentiles, values } = this;
    const of = new Uint32Array(LEVELS);
    for (let value = 0; value < LEVELS; value += 1) {
      if (percentiles[value] < threshold) of[value] = NOTHING;
      else of[value] = PALETTE[mode === "raw" ? value >> 8 : Math.round(percentiles[value] * 2.55)];
    }
    const colours = new Uint32Array(values.length);
    for (let i = 0; i < values.length; i += 1) colours[i] = of[values[i]];
    return colours;
  }
}

/** Where the tiles of a slide are, and their layers. */
export class Overlay {
  constructor(buffer, tileSize) {
    const view = new DataView(buffer);
    const magic = String.fromCharCode(...new Uint8Array(buffer, 0, MAGIC.length));
    if (magic !== MAGIC) throw new Error("The server's scores cannot be read. Reload the page.");
    const headerLength = view.getUint32(MAGIC.length + 2, true);
    let at = MAGIC.length + 6;
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, at, headerLength)));
    at += headerLength;
    const next = (Kind, length) => {
      at = Math.ceil(at / 4) * 4;
      const array = new Kind(buffer, at, length);
      at += array.byteLength;
      return array;
    };
    this.n = header.n;
    this.size = tileSize;
    this.lattice = header.corners.kind === "lattice" ? header.corners : null;
    this.places = next(this.lattice ? Uint16Array : Float32Array, 2 * this.n);
    this.layers = new Map(header.layers.map((layer) => [layer.key, new Layer(layer, next(Uint16Array, this.n))]));
    this.bytes = buffer.byteLength;
    this.#arrange();
  }

  /** [x, y] of the upper left corner of a tile. */
  corner(tile) {
    const [x, y] = [this.places[2 * tile], this.places[2 * tile + 1]];
    if (!this.lattice) return [x, y];
    return [this.lattice.origin[0] + x * this.lattice.step, this.lattice.origin[1] + y * this.lattice.step];
  }

  centre(tile) {
    return this.corner(tile).map((place) => place + this.size / 2);
  }

  /** The tile at a place of the slide; the last one where they overlap; null where there is none. */
  tileAt(x, y) {
    if (this.cells) {
      const { origin, step } = this.lattice;
      const [column, row] = [x - origin[0], y - origin[1]].map((place) => Math.floor(place / step));
      if (column < 0 || row < 0 || column >= this.columns || row >= this.rows) return null;
      const tile = this.cells[row * this.columns + column];
      return tile < 0 ? null : tile;
    }
    for (let tile = this.n - 1; tile >= 0; tile -= 1) {
      const [left, top] = this.corner(tile);
      if (x >= left && y >= top && x < left + this.size && y < top + this.size) return tile;
    }
    return null;
  }

  /**
   * Where tiles fill their cells of a lattice, a cell is one pixel of a picture that is drawn enlarged: exact, and as
   * quick for 200,000 tiles as for ten. Two tiles in one cell, gaps and overlaps are drawn as squares.
   */
  #arrange() {
    this.cells = null;
    if (!this.lattice || Math.abs(this.size - this.lattice.step) > 1e-3 * this.lattice.step) return;
    let [columns, rows] = [0, 0];
    for (let i = 0; i < this.places.length; i += 2) {
      columns = Math.max(columns, this.places[i] + 1);
      rows = Math.max(rows, this.places[i + 1] + 1);
    }
    if (columns * rows > LARGEST_SHEET || Math.max(columns, rows) > LARGEST_SIDE) return;
    const cells = new Int32Array(columns * rows).fill(-1);
    for (let tile = 0; tile < this.n; tile += 1) {
      const cell = this.places[2 * tile + 1] * columns + this.places[2 * tile];
      if (cells[cell] >= 0) return;
      cells[cell] = tile;
    }
    Object.assign(this, { cells, columns, rows });
  }
}

/** Colours of what one head of a tile looks at: (n,) colours and the ends of the scale. */
export function rowColours(n, neighbours, shares) {
  const colours = new Uint32Array(n);
  const high = shares.reduce((a, b) => Math.max(a, b), 0) || 1;
  neighbours.forEach((tile, i) => { colours[tile] = pixelOf(shares[i] / high); });
  return { colours, low: 0, high };
}
