// The page: a heading, a tab for each thing that there is to see, and the keys.

/** The tabs and the panels that they show. */
class Tabs {
  constructor(list, main) {
    this.list = list;
    this.main = main;
    this.all = [];
    list.addEventListener("keydown", (event) => this.key(event));
  }

  add(id, title, content, split = false) {
    const tab = make("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, click: () => this.show(id) }, title);
    const panel = make("div", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, class: split ? "split" : null, tabindex: split ? null : 0 }, content);
    this.list.append(tab);
    this.main.append(panel);
    this.all.push({ id, tab, panel });
  }

  show(id) {
    for (const each of this.all) {
      const chosen = each.id === id;
      each.tab.setAttribute("aria-selected", String(chosen));
      each.tab.tabIndex = chosen ? 0 : -1;
      each.panel.hidden = !chosen;
    }
  }

  /** Show a view, and put the keyboard there. */
  go(id) {
    this.show(id);
    this.all.find((each) => each.id === id).tab.focus();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = this.all.findIndex((each) => each.tab.tabIndex === 0);
    const next = this.all[(now + step + this.all.length) % this.all.length];
    this.go(next.id);
    event.preventDefault();
  }
}

/** One line on a checkpoint. */
function summaryOf(leaves, format) {
  const { bytes, chunks } = leaves.total();
  return `${format === "xckpt" ? "" : `${format}, `}${leavesText(leaves.count)}, ${bytesText(bytes)} in ${counted(chunks, "chunk")}`;
}

function start() {
  const page = pageShown;
  const tabs = new Tabs(found("tabs"), found("main"));
  found("title").textContent = page.path;
  let view = null;
  if (page.checkpoint) {
    const leaves = new Leaves(page.checkpoint);
    found("summary").textContent = summaryOf(leaves, page.format);
    const list = new LeafList(leaves, (leaf) => view.show(leaf));
    view = new LeafView(leaves, page, list);
    const goTo = (leaf) => {
      tabs.show("leaves");
      list.goTo(leaf);
    };
    tabs.add("leaves", "Leaves", [list.element, view.element], true);
    if (page.served || page.plan) {
      view.plan = new PlanView(leaves, page, () => view.again(), goTo);
      tabs.add("plan", "Plan", view.plan.element);
    }
    if (page.served || page.diff) tabs.add("diff", "Differences", new DiffView(leaves, page, goTo).element);
    if (page.served && page.beside) found("summary").append(" - ", make("a", { href: "../../" }, "all steps of the run"));
    if (page.checkpoint.metadata) tabs.add("metadata", "Metadata", make("pre", {}, page.checkpoint.metadata));
  }
  if (page.run) {
    found("summary").textContent = runSummary(page.run, page.shared_once ?? 0);
    tabs.add("run", "Run", runView(page));
  }
  tabs.show(tabs.all[0].id);
  listenToKeys(tabs, view);
  performance.mark("drawn");
}

start();
