// The panels in which metrics are drawn, and their order.
import { t } from "./i18n.js";

/** Panels: name, and a predicate for its metrics. Evaluations have their own panels.
 * @type {[string, (name: string) => boolean][]} */
export const PANELS = [
  ["reward", (name) => name === "critic/score/mean" || /^reward\/.+\/mean$/.test(name)],
  ["held_out", (name) => /^val-core\/.+\/acc\/(mean|maj|best)@/.test(name) || /^eval\/.+_accuracy$/.test(name)],
  ["held_out_reward", (name) => /^val-core\/.+\/reward\/mean@/.test(name)],
  ["held_out_loss", (name) => ["val/loss", "eval/loss", "eval/nll_per_token"].includes(name)],
  ["held_out_margin", (name) => name === "eval/preference_margin"],
  ["accuracy", (name) => name === "train/accuracy" || name === "rewards/accuracies"],
  ["loss", (name) => ["train/loss", "sft/nll_per_token", "preference/loss", "reward_model/loss"].includes(name)],
  ["margins", (name) => /^rewards\/(margins|chosen|rejected)$/.test(name)],
  ["logps", (name) => /^logps\/(chosen|rejected)$/.test(name)],
  ["signal", (name) => /^by_group\/frac_(mixed|all_good|all_bad)$/.test(name)],
  ["length", (name) => name === "response_length/mean"],
  ["entropy", (name) => name === "actor/entropy"],
  ["kl", (name) => name === "actor/ppo_kl" || name === "actor/kl_loss"],
  ["gradient", (name) => name === "actor/grad_norm"],
  ["critic", (name) => name === "critic/vf_explained_var" || name === "critic/values/mean"],
  ["truncation", (name) => name === "response_length/clip_ratio"],
  ["clip", (name) => name === "actor/pg_clipfrac"],
  ["gap", (name) => name === "training/rollout_probs_diff_mean" || name === "training/rollout_probs_diff_max"],
  ["environment", (name) => /^environment\/(turns|replies)/.test(name) && name.split("/").length < 4],
  ["staleness", (name) => /^async\/staleness/.test(name)],
  ["rate", (name) => name === "actor/lr"],
  ["throughput", (name) => name === "perf/throughput"],
  ["phases", (name) => /^timing_s\//.test(name) && name !== "timing_s/step"],
  ["memory", (name) => /^perf\/.*memory/.test(name)],
];

/** Key panels by kind of run; the first eight that a run has come first. */
const FIRST = {
  rl: ["reward", "held_out", "held_out_reward", "accuracy", "length", "entropy", "signal", "kl", "gradient", "critic", "environment", "staleness", "truncation", "clip", "gap", "throughput"],
  preferences: ["held_out", "margins", "loss", "accuracy", "logps", "kl", "entropy", "gradient", "held_out_margin", "rate", "throughput"],
  reward_model: ["loss", "held_out_loss", "accuracy", "held_out", "margins", "gradient", "rate", "throughput", "phases", "memory"],
  sft: ["loss", "held_out_loss", "accuracy", "held_out", "gradient", "rate", "throughput", "phases", "memory"],
  pretrain: ["loss", "held_out_loss", "gradient", "rate", "throughput", "phases", "memory"],
};
/** Sections of the other panels, by the prefix of their first metric. */
const SECTIONS = {
  evaluation: ["val-core", "val-aux", "val", "eval"],
  rollouts: ["reward", "critic", "by_group", "response_length", "prompt_length", "text", "environment", "train", "rollout", "curriculum"],
  training: ["actor", "training", "rewards", "reward_model", "sft", "preference", "logps", "async", "pool", "rollout_corr", "moe"],
  speed: ["perf", "timing_s"],
};
const sectionOf = (name) => Object.keys(SECTIONS).find((section) => SECTIONS[section].includes(name.split("/")[0])) ?? "other";
const MOST = 8;
/** Panels that are shown even if constant, because that matters. */
const ALWAYS = ["reward", "held_out", "accuracy", "loss"];

export function kindOf(names) {
  if (names.includes("critic/score/mean")) return "rl";
  if (names.includes("reward_model/loss")) return "reward_model";
  if (names.includes("rewards/margins")) return "preferences";
  return names.includes("sft/nll_per_token") ? "sft" : "pretrain";
}

/** Return the common name of metrics that share a chart: mean, max and min; failures of one reward; pass@k. */
function stem(name) {
  const found = /^(.+)\/(mean|max|min|std)$/.exec(name) || /^(.+)\/(timeouts|errors|crashes|invalid)$/.exec(name) || /^(val-core\/.+\/\w+)\/(mean|maj|best)@\d+$/.exec(name);
  return found ? found[1] : name;
}

/** Match a search: each word must be in one of the texts. */
export function matches(words, texts) {
  const said = texts.join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => said.includes(word));
}

/**
 * @typedef {{id: string, titles: string[], first: boolean, section: string, metrics: {name: string, also: string[]}[]}} Panel
 * @param {{names: string[], constant: Record<string, number>, alike: string[][]}} given
 * @returns {{panels: Panel[], flat: [string, number][]}} the panels in order, and the constant metrics
 */
export function arranged({ names, constant, alike }) {
  const taken = new Set();
  const drafts = PANELS.map(([id, test]) => {
    const own = names.filter((name) => !taken.has(name) && test(name));
    own.forEach((name) => taken.add(name));
    return { id, titles: [t(`chart_${id}`)], named: true, names: own };
  });
  const rest = new Map();
  for (const name of names.filter((one) => !taken.has(one))) rest.set(stem(name), [...(rest.get(stem(name)) || []), name]);
  for (const [id, own] of [...rest].sort()) drafts.push({ id: own.length > 1 ? id : own[0], titles: [own.length > 1 ? id : own[0]], named: false, names: own });

  const flat = drafts.filter(({ id, names: own }) => !ALWAYS.includes(id) && own.every((name) => name in constant));
  const drawn = drafts.filter((draft) => draft.names.length && !flat.includes(draft));
  const order = FIRST[kindOf(names)];
  drawn.sort((a, b) => (order.indexOf(a.id) + 1 || 99) - (order.indexOf(b.id) + 1 || 99));

  const leader = new Map(alike.flatMap((group) => group.map((name) => [name, group[0]])));
  const of = (name) => leader.get(name) ?? name;
  /** @type {Panel[]} */
  const panels = [];
  for (const draft of drawn) {
    const metrics = [];
    for (const name of draft.names) {
      const same = metrics.find((one) => of(one.name) === of(name));
      if (same) same.also.push(name);
      else metrics.push({ name, also: [] });
    }
    // Metrics equal to those of an earlier panel are named there. A panel with its own title is only merged as a whole.
    const within = (panel) => metrics.every(({ name }) => panel.metrics.some((one) => of(one.name) === of(name)));
    const twin = panels.find((panel) => within(panel) && (!draft.named || panel.metrics.length === metrics.length));
    if (twin) {
      if (draft.named) twin.titles.push(...draft.titles);
      for (const { name, also } of metrics) twin.metrics.find((one) => of(one.name) === of(name)).also.push(name, ...also);
    } else panels.push({ id: draft.id, titles: draft.titles, first: false, section: sectionOf(draft.names[0]), metrics });
  }
  // After equal panels are merged, so that all of the first eight are shown.
  for (const panel of panels.filter(({ id }) => order.includes(id)).slice(0, MOST)) Object.assign(panel, { first: true, section: "first" });
  const sections = ["first", ...Object.keys(SECTIONS), "other"];
  panels.sort((a, b) => sections.indexOf(a.section) - sections.indexOf(b.section));
  return { panels, flat: flat.flatMap(({ names: own }) => own.map((name) => /** @type {[string, number]} */ ([name, constant[name]]))) };
}

/** One panel per metric, for several runs, in the order of a run's panels. Metrics that are equal in all runs share one;
 * constant ones are left out.
 * @returns {{id: string, title: string, also: string[]}[]} */
export function apartFrom({ names, constant, alike }) {
  const first = FIRST[kindOf(names)];
  const place = (name) => {
    const known = PANELS.find(([, test]) => test(name));
    return [known ? first.indexOf(known[0]) + 1 || 90 : 99, name.startsWith("val-core/") || name.startsWith("eval/") ? 0 : 1, known ? known[0] : "", /\/mean@/.test(name) ? 0 : 1, name];
  };
  const placed = names.filter((name) => !(name in constant)).map((name) => ({ name, place: place(name) }));
  placed.sort((a, b) => a.place.map((one, i) => (one < b.place[i] ? -1 : one > b.place[i] ? 1 : 0)).find(Boolean) ?? 0);
  const panels = [];
  for (const { name, place: [, , id] } of placed) {
    const group = alike.find((one) => one.includes(name));
    const twin = group && panels.find((panel) => group.includes(panel.id));
    if (twin) twin.also.push(name);
    else panels.push({ id: name, title: id ? t(`chart_${id}`) : name, also: [] });
  }
  return panels;
}

/** A further name of a curve, without the prefix it shares with the first. */
export function otherName(name, other) {
  const [own, parts] = [name.split("/"), other.split("/")];
  const start = parts.findIndex((part, i) => part !== own[i]);
  return parts.slice(Math.min(start || parts.length - 2, parts.length - 1)).join("/");
}

/** Names of a panel's curves, without their common prefix and suffix. */
export function labels(names) {
  const parts = names.map((name) => name.split("/"));
  const shortest = Math.min(...parts.map((one) => one.length));
  const same = (at) => parts.every((one) => at(one) === at(parts[0]));
  let start = 0;
  while (names.length > 1 && start < shortest - 1 && same((one) => one[start])) start++;
  let end = 0;
  while (names.length > 1 && end < shortest - start - 1 && same((one) => one[one.length - 1 - end])) end++;
  return parts.map((one) => one.slice(start, one.length - end).join("/").replace(/^(frac_|val-core\/)/, ""));
}
