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

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = this.all.findIndex((each) => each.tab.tabIndex === 0);
    const next = this.all[(now + step + this.all.length) % this.all.length];
    this.show(next.id);
    next.tab.focus();
    event.preventDefault();
  }
}

/** One line on a checkpoint. */
function summaryOf(leaves, format) {
  const { bytes, chunks } = leaves.total();
  return `${format === "xckpt" ? "" : `${format}, `}${leavesText(leaves.count)}, ${bytesText(bytes)} in ${counted(chunks, "chunk")}`;
}

function start() {
  const page = JSON.parse(found("page").textContent);
  const tabs = new Tabs(found("tabs"), found("main"));
  found("title").textContent = page.path;
  if (page.checkpoint) {
    const leaves = new Leaves(page.checkpoint);
    found("summary").textContent = summaryOf(leaves, page.format);
    const view = new LeafView(leaves, page);
    const list = new LeafList(leaves, (leaf) => view.show(leaf));
    tabs.add("leaves", "Leaves", [list.element, view.element], true);
    if (page.served || page.plan) {
      view.plan = new PlanView(leaves, page, () => view.leaf !== undefined && view.show(view.leaf));
      tabs.add("plan", "Plan", view.plan.element);
    }
    if (page.checkpoint.metadata) tabs.add("metadata", "Metadata", make("pre", {}, page.checkpoint.metadata));
  }
  if (page.run) {
    found("summary").textContent = `a run of ${counted(page.run.length, "step")}`;
    tabs.add("run", "Run", runView(page));
  }
  if (page.diff || (page.served && page.checkpoint)) tabs.add("diff", "Differences", new DiffView(page).element);
  tabs.show(tabs.all[0].id);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey) return;
    found("search")?.focus();
    event.preventDefault();
  });
  performance.mark("drawn");
}

start();
