// One pane: the slide in OpenSeadragon, and above it a canvas that is drawn whenever the slide moves.

import { imageTile } from "./api.js";
import { drawColourBar, drawOutlines, drawScaleBar, drawTile } from "./painting.js";

const { OpenSeadragon } = window;
const STEP = 1.5; // of one press of a zoom button
const MARGIN = 0.05; // around the tiles, as a share of their extent

// OpenSeadragon adds a style to the page unless it finds one with this mark; the page's policy would report it. An
// element without a namespace bears the mark and is no style.
const mark = document.createElementNS("", "style");
mark.setAttribute("data-openseadragon-mobile-css", "");
document.head.append(mark);

export class Pane {
  /** handlers: moved(pane), picked(pane, x, y), chosen(pane, {model, layer}), retried(). */
  constructor(parent, handlers) {
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    parent.append(this.root);
    const find = (name) => this.root.querySelector(name);
    [this.model, this.layer, this.stage] = [find(".model"), find(".layer"), find(".slide")];
    [this.canvas, this.message, this.again] = [find("canvas"), find(".message"), find(".message button")];
    this.context = this.canvas.getContext("2d");
    this.viewer = new OpenSeadragon.Viewer({
      element: this.stage, drawer: "canvas", showNavigationControl: false, tabIndex: "", animationTime: 0.35,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true }, visibilityRatio: 0.2, minZoomImageRatio: 0.4,
      springStiffness: 9, zoomPerScroll: 1.3, imageLoaderLimit: 6, maxImageCacheCount: 400,
      smoothTileEdgesMinZoom: Infinity,
    });
    this.leads = false; // other panes follow this one
    this.whole = true; // nobody moved it since it showed the whole slide
    this.stage.addEventListener("pointerdown", () => { this.leads = true; }, true);
    this.stage.addEventListener("wheel", () => this.#take(), { capture: true, passive: true });
    this.viewer.addHandler("canvas-drag", () => this.#take());
    this.viewer.addHandler("canvas-double-click", () => this.#take());
    this.viewer.addHandler("canvas-pinch", () => this.#take());
    // OpenSeadragon changes the zoom with the size, after it told of it.
    this.viewer.addHandler("resize", () => {
      const { last, whole } = this;
      queueMicrotask(() => {
        if (!this.slide) return;
        if (whole) this.#fit(true);
        else if (last) this.moveTo(last);
        handlers.moved(this);
      });
    });
    this.viewer.addHandler("update-viewport", () => this.draw());
    this.viewer.addHandler("viewport-change", () => this.slide && handlers.moved(this));
    this.viewer.addHandler("canvas-key", (event) => { event.preventDefaultAction = true; });
    this.viewer.addHandler("canvas-click", (event) => {
      if (!event.quick || !this.slide) return;
      const { x, y } = this.viewer.viewport.viewerElementToImageCoordinates(event.position);
      handlers.picked(this, x, y);
    });
    find(".zoom-in").addEventListener("click", () => this.zoomBy(STEP));
    find(".zoom-out").addEventListener("click", () => this.zoomBy(1 / STEP));
    find(".whole").addEventListener("click", () => this.showWhole());
    this.model.addEventListener("change", () => handlers.chosen(this, { model: this.model.value }));
    this.layer.addEventListener("change", () => handlers.chosen(this, { layer: this.layer.value }));
    this.again.addEventListener("click", () => handlers.retried());
  }

  /** Shows a slide without its tiles, at a place of another pane or address, or as a whole. */
  open(slide, place) {
    this.slide = null;
    this.last = null; // place that was drawn
    this.picture = null;
    this.draw();
    const { width, height, image, tile_size: tileSize } = slide;
    const source = {
      width, height, tileSize: image ? image.tile_px : 512, tileOverlap: image ? (image.overlap ?? 0) : 0,
      getTileUrl: (level, column, row) => imageTile(slide.id, level, column, row),
    };
    if (image) Object.assign(source, { minLevel: image.first_level ?? 0, maxLevel: image.levels - 1 });
    else source.tileExists = () => false;
    this.viewer.maxZoomPixelRatio = Math.max(2, 600 / tileSize);
    return new Promise((resolve, reject) => {
      this.viewer.addOnceHandler("open", () => {
        this.slide = slide;
        if (place) this.moveTo(place);
        else this.#fit(true);
        resolve();
      });
      const failed = (event) => reject(new Error(`The image cannot be shown: ${event.message}`));
      this.viewer.addOnceHandler("open-failed", failed);
      this.viewer.open({ tileSource: new OpenSeadragon.TileSource(source) });
    });
  }

  /** picture: { sheet, opacity, outlines, tile, legend, umPerUnit, description } */
  show(picture) {
    this.picture = picture;
    this.stage.setAttribute("aria-label", picture.description);
    this.draw();
  }

  tell(words, canRetry = false) {
    this.message.hidden = !words;
    this.message.firstElementChild.textContent = words;
    this.again.hidden = !canRetry;
  }

  /** Centre in units of the slide, and CSS pixels per unit. */
  get place() {
    const { viewport } = this.viewer;
    const { x, y } = viewport.viewportToImageCoordinates(viewport.getCenter(true));
    return { x, y, zoom: viewport.viewportToImageZoom(viewport.getZoom(true)) };
  }

  #take() {
    this.leads = true;
    this.whole = false;
  }

  moveTo({ x, y, zoom }) {
    this.whole = false;
    this.last = { x, y, zoom };
    const { viewport } = this.viewer;
    viewport.zoomTo(viewport.imageToViewportZoom(zoom), null, true);
    viewport.panTo(viewport.imageToViewportCoordinates(x, y), true);
  }

  moveBy(x, y) {
    this.#take();
    const { viewport } = this.viewer;
    const size = viewport.getBounds();
    viewport.panBy(new OpenSeadragon.Point(x * size.width, y * size.height));
    viewport.applyConstraints();
  }

  zoomBy(factor) {
    this.#take();
    this.viewer.viewport.zoomBy(factor);
    this.viewer.viewport.applyConstraints();
  }

  showWhole() {
    if (!this.slide) return;
    this.leads = true;
    this.#fit(false);
  }

  #fit(immediately) {
    this.whole = true;
    const [x, y, width, height] = this.slide.bounds ?? [0, 0, this.slide.width, this.slide.height];
    const [dx, dy] = [width * MARGIN, height * MARGIN];
    const { viewport } = this.viewer;
    viewport.fitBounds(viewport.imageToViewportRectangle(x - dx, y - dy, width + 2 * dx, height + 2 * dy), immediately);
  }

  /** Where the slide is on the canvas now, in device pixels. */
  get frame() {
    const ratio = this.canvas.width / Math.max(this.canvas.clientWidth, 1);
    const { viewport } = this.viewer;
    const start = viewport.imageToViewerElementCoordinates(new OpenSeadragon.Point(0, 0));
    const end = viewport.imageToViewerElementCoordinates(new OpenSeadragon.Point(this.slide.width, 0));
    const scale = ((end.x - start.x) / this.slide.width) * ratio;
    const { width, height } = this.canvas;
    return { left: start.x * ratio, top: start.y * ratio, scale, width, height, ratio };
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.stage.clientWidth, this.stage.clientHeight].map((side) => Math.round(side * ratio));
    if (this.canvas.width !== width || this.canvas.height !== height) {
      [this.canvas.width, this.canvas.height] = [width, height];
      [this.canvas.style.width, this.canvas.style.height] = [width, height].map((side) => `${side / ratio}px`);
    } else this.context.clearRect(0, 0, width, height);
    if (!this.slide || !this.picture || !width) return;
    this.last = this.place;
    const { picture, context, frame } = this;
    picture.sheet.draw(context, frame, picture.opacity);
    if (picture.outlines) drawOutlines(context, frame, picture.outlines);
    if (picture.tile) drawTile(context, frame, picture.tile);
    drawScaleBar(context, frame, picture.umPerUnit, this.slide.unit);
    drawColourBar(context, frame, picture.legend);
  }

  /** What is seen, on a canvas of its own. */
  snapshot() {
    const taken = document.createElement("canvas");
    [taken.width, taken.height] = [this.canvas.width, this.canvas.height];
    const context = taken.getContext("2d");
    context.fillStyle = "#ffffff";
    context.fillRect(0, 0, taken.width, taken.height);
    const below = this.viewer.drawer.canvas;
    if (below.width && this.slide.image) context.drawImage(below, 0, 0, taken.width, taken.height);
    context.drawImage(this.canvas, 0, 0);
    return taken;
  }

  remove() {
    this.viewer.destroy();
    this.root.remove();
  }
}
