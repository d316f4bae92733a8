// Colours and size of type, which the browser remembers.
"use strict";
(() => {
  const { get } = lce;

  const memory = {
    get(name) {
      try {
        return localStorage.getItem(`lce.${name}`);
      } catch {
        return null; // a page from a file may have no memory
      }
    },
    set(name, value) {
      try {
        localStorage.setItem(`lce.${name}`, value);
      } catch {
        // then it is forgotten
      }
    },
  };

  /** Follow the controls and the system; `changed` is called after each change, and at once. */
  lce.settings = (changed) => {
    const theme = get("theme"),
      large = get("large"),
      dark = matchMedia("(prefers-color-scheme: dark)"),
      root = document.documentElement;
    const set = () => {
      root.dataset.theme = theme.value === "auto" ? (dark.matches ? "dark" : "light") : theme.value;
      root.dataset.size = large.checked ? "large" : "normal";
      changed();
    };
    theme.value = memory.get("theme") ?? "auto";
    if (!theme.value) theme.value = "auto";
    large.checked = memory.get("size") === "large";
    dark.addEventListener("change", set);
    theme.addEventListener("change", () => {
      memory.set("theme", theme.value);
      set();
    });
    large.addEventListener("change", () => {
      memory.set("size", large.checked ? "large" : "normal");
      set();
    });
    set();
  };
})();
