// What differs between the checkpoint and another, which one may type in a served page.

const KINDS = { missing: "only here", added: "only in the other", content: "other elements" };
const MOST_DIFFERENCES = 2000;

/** A kind of difference in words. */
const kindText = (kind) => KINDS[kind] ?? `other ${kind}`;

/** Seconds in words: "0:12", "1:02:05". */
function durationText(seconds) {
  const all = Math.round(seconds);
  const parts = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  return (parts[0] ? parts : parts.slice(1)).map((part, at) => (at ? String(part).padStart(2, "0") : part)).join(":");
}

/** How far a comparison is after some seconds, and when it ends if it goes on so. */
function progressText({ done, total }, seconds) {
  if (!total) return "comparing …";
  const left = done ? `, ${durationText((seconds * (total - done)) / done)} left` : "";
  return `comparing: ${Math.floor((100 * done) / total)}%, ${bytesText(done)} of ${bytesText(total)}${left}`;
}

/** Ask each second how far a comparison is; what is returned ends it. */
function watch(note, other) {
  const started = performance.now();
  return setInterval(async () => {
    const now = await ask("progress", { other }).catch(() => null);
    if (now && note.isConnected) note.textContent = progressText(now, (performance.now() - started) / 1000);
  }, 1000);
}

class DiffView {
  constructor(leaves, page, goTo) {
    this.numbers = new Map();
    this.leaves = leaves;
    this.page = page;
    this.goTo = goTo;
    this.result = make("div", { id: "diff" });
    this.element = make("div", {}, ...(page.served ? [this.form()] : []), this.result);
    if (page.diff) this.show(page.diff);
    else this.result.append(make("p", { class: "note" }, "Nothing is compared yet. Contents are compared by their digests where both are cut alike; elsewhere both are read."));
  }

  form() {
    const beside = this.page.beside ?? [];
    const options = make("datalist", { id: "beside" }, beside.map((path) => make("option", { value: path })));
    this.other = make("input", { type: "text", id: "diff-other", list: "beside", placeholder: "path or URL of another checkpoint", autocomplete: "off", spellcheck: "false", value: this.page.diff?.other ?? beside.at(-1) ?? null });
    const button = make("button", { id: "diff-it" }, "Compare");
    return make("form", { class: "bar asked", submit: (event) => this.ask(event) }, make("label", { for: "diff-other" }, "Compare with"), this.other, options, button);
  }

  async ask(event) {
    event.preventDefault();
    const other = this.other.value;
    const note = make("p", { class: "note", id: "comparing" }, "comparing …");
    this.result.replaceChildren(note);
    const watching = watch(note, other);
    try {
      this.show(await ask("diff", { other }));
      say(this.result.querySelector("h3")?.textContent ?? "Compared");
    } catch (error) {
      this.result.replaceChildren(problem(error));
    } finally {
      clearInterval(watching);
    }
  }

  show(diff) {
    if (!this.numbers.size) this.leaves.names.forEach((name, leaf) => this.numbers.set(name, leaf));
    this.result.replaceChildren(...this.said(diff));
  }

  /** The name of a leaf, to press where this checkpoint has it. */
  nameOf(each) {
    const leaf = this.numbers.get(each.name);
    if (each.kind === "metadata" || leaf === undefined) return each.name || (each.kind === "metadata" ? "the metadata" : "the root");
    return leafButton(each.name, () => this.goTo(leaf));
  }

  /** What is said of a comparison. */
  said(diff) {
    const { differences } = diff;
    const facts = factsOf([["Compared with", diff.other]]);
    const equal = [diff.equal ?? 0, diff.equal_bytes ?? 0];
    if (!differences.length) return [facts, make("p", { class: "good" }, `Nothing differs: ${leavesText(equal[0])} are equal, ${bytesText(equal[1])}.`)];
    const count = new Map();
    for (const each of differences.filter(({ kind }) => kind !== "metadata")) {
      const [number, bytes] = count.get(each.kind) ?? [0, 0];
      count.set(each.kind, [number + 1, bytes + (each.bytes ?? 0)]);
    }
    const all = [...count, ["equal", equal]];
    const sum = Math.max(1, all.reduce((total, [, [, bytes]]) => total + bytes, 0));
    const sums = all.map(([kind, [number, bytes]]) => [kind === "equal" ? kind : kindText(kind), numberText(number), bytesText(bytes), partBar(bytes / sum)]);
    const shown = differences.slice(0, MOST_DIFFERENCES);
    const rows = shown.map((each) => [this.nameOf(each), kindText(each.kind), each.first, each.second === each.first ? "" : each.second, each.bytes ? bytesText(each.bytes) : ""]);
    const more = differences.length - shown.length;
    return [facts,
      tableOf(["What", "Leaves", "Size", "Share"], sums, [1, 2], { id: "diff-sums", class: "parts" }),
      make("h3", {}, counted(differences.length, "difference")),
      tableOf(["Leaf", "What", "Here", "There", "Size"], rows, [4], { id: "differences" }),
      ...(more ? [make("p", { class: "note" }, `and ${numberText(more)} more`)] : [])];
  }
}
