// A load with another mesh: what one types, and what the planner says of it.

const MOST_ROWS = 500;

/** "1.25 x", or nothing where nothing is wanted. */
function timesText(read, wanted) {
  return wanted ? `${(read / wanted).toFixed(2)} x` : "";
}

class PlanView {
  constructor(leaves, page, onPlan, goTo) {
    this.goTo = goTo;
    this.leaves = leaves;
    this.page = page;
    this.onPlan = onPlan;
    this.result = make("div", { id: "plan" }, make("p", { class: "note" }, "What would another mesh read of this checkpoint, and who would write it? Type one above."));
    this.element = make("div", {}, ...(page.served ? this.form() : []), this.result);
    if (page.plan) this.show(page.plan);
  }

  form() {
    const first = this.leaves.page.kinds.find((kind) => kind.mesh !== undefined);
    const text = this.page.plan?.text ?? first?.sharding.replace("PartitionSpec(", "").replace(") on", " on") ?? "data on data=2";
    this.text = make("textarea", { id: "plan-text", "aria-describedby": "plan-help", spellcheck: "false", keydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.ask() });
    this.text.value = text;
    const button = make("button", { type: "button", id: "plan-it", click: () => this.ask() }, "Plan it");
    const help = 'One line for all leaves, such as "data, model on data=2 x model=4"; or a line "mesh data=2 x model=4", perhaps "hosts 2", and lines such as "model/*: data, model".';
    return [make("label", { for: "plan-text" }, "Mesh and specs of the reader"), this.text, make("p", { class: "note", id: "plan-help" }, help), make("p", {}, button)];
  }

  async ask() {
    this.plan = undefined;
    this.result.replaceChildren(make("p", { class: "note" }, "planning …"));
    try {
      this.show(await ask("plan", { text: this.text.value }));
      say("Planned");
    } catch (error) {
      this.result.replaceChildren(problem(error));
      this.onPlan();
    }
  }

  show(plan) {
    this.plan = plan;
    const sum = (entries, name) => entries.reduce((total, each) => total + each[name], 0);
    const wanted = sum(plan.hosts, "wanted");
    const read = sum(plan.hosts, "read");
    const mesh = plan.mesh.map(([name, size]) => `${name}=${size}`).join(" x ");
    this.result.replaceChildren(
      make("h2", {}, `Loaded by ${counted(plan.ranks.length, "rank")}, ${mesh}`),
      factsOf([
        ["Wanted", `${bytesText(wanted)}, what several ranks of a host want counted once`], ["Read", `${bytesText(read)} in whole chunks`], ["Amplification", timesText(read, wanted)],
        ["Handed over", `${bytesText(sum(plan.ranks, "given"))} between ranks of one host, read once`],
        ["A save with this mesh", `${bytesText(Math.min(...plan.written))} to ${bytesText(Math.max(...plan.written))} by each rank`],
      ]),
      this.hostTable(plan), this.rankTable(plan), this.leafTable(plan),
    );
    this.onPlan();
  }

  section(title, label, table) {
    return make("section", {}, make("h3", {}, title), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table));
  }

  hostTable(plan) {
    const rows = plan.hosts.map((host, at) => [String(at), bytesText(host.wanted), bytesText(host.read), timesText(host.read, host.wanted)]);
    return this.section("Hosts", "What each host reads", tableOf(["Host", "Wanted", "Read", "Amplification"], rows, [0, 1, 2, 3], { id: "hosts" }));
  }

  rankTable(plan) {
    const rows = plan.ranks.slice(0, MOST_ROWS).map((rank, at) => [
      deviceText(at, plan.mesh).replace("device", "rank"), bytesText(rank.wanted), bytesText(rank.read), numberText(rank.chunks), bytesText(rank.taken), bytesText(rank.given), bytesText(plan.written[at]),
    ]);
    return this.section("Ranks", "What each rank reads", tableOf(["Rank", "Wanted", "Reads", "Chunks", "Takes", "Hands over", "Writes in a save"], rows, [1, 2, 3, 4, 5, 6], { id: "ranks" }));
  }

  /** The leaves that cost most beyond what is wanted come first. */
  leafTable(plan) {
    const tensors = [...plan.target.keys()].filter((leaf) => plan.target[leaf] >= 0);
    const extra = (leaf) => plan.read[leaf] - plan.wanted[leaf];
    tensors.sort((a, b) => extra(b) - extra(a) || a - b);
    const rows = tensors.slice(0, MOST_ROWS).map((leaf) => {
      const target = plan.targets[plan.target[leaf]];
      return [leafButton(this.leaves.names[leaf], () => this.goTo(leaf)), target.spec, bytesText(plan.wanted[leaf]), bytesText(plan.read[leaf]), timesText(plan.read[leaf], plan.wanted[leaf]), target.grid ?? ""];
    });
    const title = tensors.length > MOST_ROWS ? `Leaves (the ${MOST_ROWS} with most beyond what is wanted)` : "Leaves";
    return this.section(title, "What is read of each leaf", tableOf(["Leaf", "Spec", "Wanted", "Read", "Amplification", "Saved as"], rows, [2, 3, 4], { id: "plan-leaves" }));
  }

  /** The shards that the reader wants of a leaf, for its picture; null without a plan. */
  targets(leaf) {
    if (!this.plan || this.plan.target[leaf] < 0) return null;
    const cuts = this.plan.targets[this.plan.target[leaf]].cuts.map((number) => this.plan.cuts[number]);
    return { cuts, mesh: this.plan.mesh };
  }

  /** Who reads each chunk of a leaf; null where the plan does not say. */
  readers(leaf) {
    const rows = this.plan?.readers?.[leaf];
    if (!rows) return null;
    const cells = rows.slice(0, MOST_ROWS).map(([chunk, rank, ...takers]) => [String(chunk), String(rank), takers.join(", ")]);
    return this.section("Who reads which chunk", "Who reads which chunk", tableOf(["Chunk", "Read by rank", "Handed over to ranks"], cells, [0, 1], { id: "readers" }));
  }
}
