// What the keyboard does, and the box that says so.

const KEYS = [
  ["/", "search the leaves"], ["1, 2, 3 ...", "the first, second, third ... view"], ["arrows, Page Up, Page Down, Home, End", "walk the list; right and left open and close"],
  ["Enter, Space", "choose a leaf, open or close a container"], ["Ctrl+Enter", "plan what is typed"], ["Escape", "leave the search; back to the overview"], ["?", "this list"],
];

/** The box of keys, closed. */
function keysDialog() {
  const close = make("button", { type: "button", click: () => dialog.close() }, "Close");
  const dialog = make("dialog", { id: "keys", "aria-label": "Keys" }, make("h2", {}, "Keys"), factsOf(KEYS), close);
  return dialog;
}

/** Listen to the keys that work everywhere; in a field they are typed. */
function listenToKeys(tabs, view) {
  const dialog = keysDialog();
  document.body.append(dialog);
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    const search = found("search");
    if (event.key === "/" && search) {
      tabs.show("leaves");
      search.focus();
    } else if (event.key === "?") dialog.showModal();
    else if (event.key === "Escape") view?.overview();
    else if (/^[1-9]$/.test(event.key) && tabs.all[event.key - 1]) tabs.go(tabs.all[event.key - 1].id);
    else return;
    event.preventDefault();
  });
}
