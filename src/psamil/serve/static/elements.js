// Elements of the page with their contents. Text stays text: names of slides and models come from files.

/** element("p", {class: "quiet", onclick: f}, "text", child, ...) */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A bar that is filled to a share from 0 to 1. */
export function bar(share, label) {
  const filled = element("span", { class: "filled" });
  filled.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return element("span", { class: "meter", role: "img", "aria-label": label }, filled);
}
