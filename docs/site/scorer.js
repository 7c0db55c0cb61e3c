// How the site's search weighs what it finds: pages that say how to do something come before lists
// of names, and those before what concerns the developers of xckpt.
var Scorer = {
  score: ([page, _title, _anchor, _text, score]) => {
    if (/^(CHANGELOG|CONTRIBUTING|architecture|spec\/)/.test(page)) return score - 20;
    if (/^(reference\/api|why|.*\/index$)/.test(page)) return score - 8;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
