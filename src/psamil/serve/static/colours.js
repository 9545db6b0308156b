// Viridis: equal steps of a score look equally large, also in print and to eyes that do not tell red from green.

const STOPS = (
  "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3b528b 375b8d 33638d 2f6b8e 2c728e 297a8e 26828e 23898e "
  + "21908c 1f978b 1f9f88 21a685 27ad81 31b57b 3ebc74 4dc26c 5cc863 6ece58 82d34d 95d840 aadc32 c0df25 d5e21a eae51a "
  + "fde725"
).split(" ").map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

const LITTLE_ENDIAN = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;

function packed([r, g, b]) {
  return (LITTLE_ENDIAN ? (255 << 24) | (b << 16) | (g << 8) | r : (r << 24) | (g << 16) | (b << 8) | 255) >>> 0;
}

function mixed(share) {
  const place = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1);
  const i = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[i].map((from, c) => Math.round(from + (STOPS[i + 1][c] - from) * (place - i)));
}

/** 256 colours, as pixels of an ImageData. */
export const PALETTE = Uint32Array.from({ length: 256 }, (_, i) => packed(mixed(i / 255)));
export const NOTHING = 0;

/** The colour of a share from 0 to 1, as a pixel. */
export const pixelOf = (share) => PALETTE[Math.round(Math.min(Math.max(share, 0), 1) * 255)];

/** The same for CSS and canvas. */
export const cssOf = (share) => `rgb(${mixed(share).join(" ")})`;
export const cssOfPixel = (pixel) => {
  const bytes = new Uint8Array(new Uint32Array([pixel]).buffer);
  return `rgb(${bytes[0]} ${bytes[1]} ${bytes[2]})`;
};
