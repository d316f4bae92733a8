// Small helpers: elements, numbers as people write them, colours of the theme, sharp canvases.
"use strict";
window.lce = {};
(() => {
  /** An element with attributes and children. Text only ever becomes a text node. */
  lce.el = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child != null));
    return element;
  };
  lce.get = (id) => document.getElementById(id);

  lce.number = (x) => x.toLocaleString("en-US");
  lce.some = (n, one, many = `${one}s`) => `${lce.number(n)} ${n === 1 ? one : many}`;
  lce.share = (x) => {
    if (x == null || !isFinite(x)) return "–";
    const percent = 100 * x;
    return percent === 0
      ? "0%"
      : percent < 0.1
        ? "< 0.1%"
        : `${percent.toFixed(percent < 9.95 || (percent > 99.05 && percent < 99.95) ? 1 : 0)}%`;
  };
  lce.size = (bytes) => {
    let value = bytes,
      unit = 0;
    while (value >= 1024 && unit < 4) {
      value /= 1024;
      unit += 1;
    }
    const digits = unit && value < 9.95 ? value.toFixed(1) : Math.round(value);
    return `${digits} ${["bytes", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };
  lce.list = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);

  /** A token as one reads it: line ends and other characters without a shape get a sign. */
  lce.shape = (text) =>
    text
      .replace(/\n/g, "↵")
      .replace(/\t/g, "→   ")
      .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, "·") || "·";

  /** A token on a button or in a sentence: without its leading space. Spaces alone are named: fonts cut a sign for them. */
  lce.chip = (text) => (/^ +$/.test(text) ? lce.some(text.length, "space") : lce.shape(text.replace(/^ /, "")));

  /** The theme's colours by name, read again when the theme changes. */
  const names = ["panel", "ink", "muted", "line", "soft", "blue", "chosen", "mark", "miss", "always", "scored"];
  lce.colours = {};
  lce.readColours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of names) lce.colours[name] = style.getPropertyValue(`--${name}`).trim();
    lce.rem = parseFloat(style.fontSize);
    lce.font = style.getPropertyValue("--font").trim();
  };
  lce.blue = (depth) => `rgb(${lce.colours.blue} / ${depth})`;

  /** Make a canvas `width` by `height` CSS pixels, sharp on any screen; returns its cleared context. */
  lce.canvas = (canvas, width, height) => {
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
    if (canvas.width !== w || canvas.height !== h) {
      [canvas.width, canvas.height] = [w, h];
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `${0.75 * lce.rem}px ${lce.font}`;
    context.textBaseline = "middle";
    return context;
  };
  lce.still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
})();
