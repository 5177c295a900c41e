// Order of search results: pages that say how to do something before those about the inside of the project; names of
// C++ and of other libraries last.
const INSIDE = /^(design|code|kernels|contributing|log|history\/.*|measurements|museum|when_not)$/;
const LAST = /^(api\/(cpp|compat)|changelog)$/;
var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score + (LAST.test(docname) ? -40 : INSIDE.test(docname) ? -8 : docname.startsWith("api/") ? 0 : 4),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
