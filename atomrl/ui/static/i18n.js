// The words of the pages, in English and Chinese: key: [English, Chinese].
export const WORDS = {
  ago: ["{time} ago", "{time}前"], left: ["{time} left", "剩余 {time}"], left_sentence: ["About {time} left.", "大约还需 {time}。"],
  s: ["{n} s", "{n} 秒"], min: ["{n} min", "{n} 分"], h: ["{n} h", "{n} 小时"], d: ["{n} d", "{n} 天"],
  running: ["running", "运行中"], finished: ["finished", "已完成"], stopped: ["stopped", "已停止"], failed: ["failed", "失败"],
  gone: ["This is not there (any more).", "不存在（或已被删除）。"], unauthorized: ["Open the address that `atomrl ui` printed.", "请打开 `atomrl ui` 输出的地址。"],
  loading: ["Reading…", "读取中…"], lost: ["The server does not answer; trying again…", "服务器没有响应，正在重试…"],
  started_anew: ["The server was started anew, with another address: it is in its terminal.", "服务器已重新启动，地址已改变：新地址见其终端。"],
  skip: ["Skip to the content", "跳到正文"], pages: ["Pages", "页面"], parts: ["Parts of this run", "本次运行的各部分"],
  runs: ["Runs", "运行"], run: ["Run", "运行"], language: ["Language", "语言"], theme: ["Colours", "配色"], auto: ["auto", "自动"], light: ["light", "浅色"], dark: ["dark", "深色"],
  keyboard: ["Keyboard", "键盘"], close: ["Close", "关闭"], "key_/": ["search", "搜索"], key_j: ["next completion", "下一条回答"], key_k: ["previous completion", "上一条回答"],
  "key_[": ["this prompt in an earlier step", "此提示在更早的步"], "key_]": ["this prompt in a later step", "此提示在更晚的步"],
  key_Enter: ["on a curve: completions of that step", "在曲线上：该步的回答"], key_g: ["all runs", "全部运行"], "key_?": ["this help", "本帮助"],
  choose: ["Choose {name}", "选择 {name}"], chosen: ["Chosen", "已选"], progress: ["Progress", "进度"], of_training: ["training", "训练"], none: ["none", "无"],
  search: ["Search", "搜索"], search_runs: ["Search: name, algorithm, status, finding", "搜索：名称、算法、状态、诊断"], search_config: ["Search lines", "搜索行"],
  sort: ["Sort", "排序"],
  group_seeds: ["Group by config minus seed", "按配置分组（忽略种子）"], group_of: ["{name} × {n}: mean {value}, held-out {held}", "{name} × {n}：均值 {value}，留出 {held}"],
  compare: ["Compare", "比较"], compare_n: ["Compare {n} runs", "比较 {n} 个运行"], compare_cut: ["Only the first {n} runs are compared; {left} more are left out.", "只比较前 {n} 个运行，另有 {left} 个未显示。"],
  compare_hint: ["Choose two or more to compare", "勾选两个以上即可比较"],
  new_run: ["New run", "新运行"], count: ["{shown} of {all} runs, {running} running", "共 {all} 个运行，显示 {shown} 个，{running} 个运行中"],
  nothing_found: ["Nothing matches.", "没有匹配的内容。"], no_runs: ["No runs in {folder} yet: start one, and it appears here.", "{folder} 中还没有运行：启动后会出现在这里。"],
  status: ["Status", "状态"], name: ["Name", "名称"], algorithm: ["Algorithm", "算法"], value: ["Reward / loss", "奖励 / 损失"], held_out: ["Held-out", "留出集"],
  accuracy: ["Accuracy", "准确率"], held_out_accuracy: ["Held-out accuracy", "留出准确率"], findings: ["Findings", "诊断"], lr: ["LR", "学习率"], learning_rate: ["Learning rate", "学习率"], seed: ["Seed", "种子"], updated: ["Updated", "更新"],
  overview: ["Overview", "概览"], charts: ["Charts", "曲线"], rollouts: ["Rollouts", "回答"], config: ["Config", "配置"], log: ["Log", "日志"],
  verdict: ["Verdict", "结论"], verdict_running: ["Running: step {step} of {steps}.", "运行中：第 {step} / {steps} 步。"], verdict_finished: ["Finished after {step} steps.", "已完成，共 {step} 步。"],
  verdict_stopped: ["Stopped on request after step {step} of {steps}; it can be resumed.", "应要求停在第 {step} / {steps} 步，可以继续。"],
  verdict_failed: ["Died at step {step} of {steps} without an error message: killed, or out of memory. It can be resumed.", "在第 {step} / {steps} 步没有错误信息就结束了：被杀死或内存不足，可以继续。"],
  verdict_errors: ["The doctor found {n} error(s), the first at step {step}: {name}.", "诊断发现 {n} 个错误，最早在第 {step} 步：{name}。"],
  verdict_warnings: ["The doctor has {n} warning(s), the first since step {step}: {name}.", "诊断有 {n} 个警告，最早自第 {step} 步：{name}。"], verdict_healthy: ["Nothing is wrong that the doctor knows of.", "诊断未发现问题。"],
 
 
  error: ["error", "错误"], warning: ["warning", "警告"], since_step: ["since step {step}", "自第 {step} 步"], try: ["Try:", "建议："], evidence: ["Completions of steps {from} to {to}", "第 {from} 到 {to} 步的回答"],
  curves: ["Curves", "曲线"], evaluations: ["Evaluations", "评估"], facts: ["Facts", "信息"], model: ["Model", "模型"], step_seconds: ["A step takes", "每步用时"], started: ["Started", "开始"],
  known_by: ["Status is known by", "状态依据"], command: ["Command", "命令"], machine: ["Machine", "机器"], commit: ["Commit", "提交"], resumed: ["Resumed at step", "从此步继续"],
  unreadable: ["What could not be read", "无法读取的内容"], step: ["Step", "步"], asking_schema: ["Asking the config's schema (a few seconds at first)…", "正在查询配置模式（首次需要几秒）…"],
  other_version: ["This version does not take this config:", "当前版本不接受此配置："], changed: ["Other than the defaults", "与默认值不同"], key: ["Key", "键"], default: ["Default", "默认"], equation: ["Equation", "公式"],
  no_log: ["This run has no log: it has not begun, or an earlier version made it.", "没有日志：尚未开始，或由旧版本创建。"],
  stop: ["Stop after this step", "本步后停止"], resume: ["Resume", "继续"], variant: ["New run like this", "以此新建"], stop_asked: ["asked to end after its step", "已请求在本步后结束"], resume_asked: ["started", "已启动"],
  charts_hint: ["Drag over a stretch to look closer, double-click for the whole run; by keyboard + and −. A click on a step, or Enter, shows its completions.", "拖动可放大，双击恢复；键盘用 + 和 −。点击某步或按 Enter 查看该步回答。"], whole_run: ["Whole run", "全部步"],
  curve_said: ["{label} from {first} (step {from}) to {last} (step {to})", "{label} 从 {first}（第 {from} 步）到 {last}（第 {to} 步）"],
  chart_reward: ["Reward", "奖励"], chart_accuracy: ["Accuracy", "准确率"], chart_signal: ["Groups: mixed, all good, all bad", "组：混合、全对、全错"], chart_loss: ["Loss (nats per token)", "损失（每词元 nats）"],
  chart_margins: ["Margins of preferences", "偏好间隔"], chart_length: ["Completion length (tokens)", "回答长度（词元）"], chart_truncation: ["Cut at the limit", "被截断的比例"], chart_entropy: ["Entropy (nats per token)", "熵（每词元 nats）"],
  chart_kl: ["KL", "KL"], chart_clip: ["Share of clipped tokens", "裁剪词元比例"], chart_gradient: ["Gradient norm", "梯度范数"], chart_gap: ["Gap between engine and trainer", "引擎与训练器概率差"],
  chart_critic: ["Critic", "评论家"], chart_environment: ["Environment", "环境"], chart_staleness: ["Staleness", "陈旧度"], chart_phases: ["Seconds by phase", "各阶段秒数"], chart_throughput: ["Tokens per second", "每秒词元"],
  evaluations_marked: ["◇ on the step axis: evaluations on what is held out, with {name}", "步轴上的 ◇：留出集评估，数值为 {name}"], chart_memory: ["Memory (GiB)", "内存（GiB）"], chart_rate: ["Learning rate", "学习率"],
  text: ["Text", "文本"], first_step: ["From step", "起始步"], last_step: ["to step", "到步"], split: ["Part", "部分"], min_reward: ["Reward ≥", "奖励 ≥"], max_reward: ["Reward ≤", "奖励 ≤"],
  min_length: ["Tokens ≥", "词元 ≥"], max_length: ["Tokens ≤", "词元 ≤"], finish_reason: ["Ended by", "结束原因"], data_source: ["Data source", "数据源"], any: ["any", "任意"], mixed: ["only mixed groups", "只看混合组"],
 
 
  all_prompts: ["All prompts", "全部提示"], reset: ["Reset", "重置"], rollouts_found: ["{n} of {of} completions", "{of} 条回答中的 {n} 条"], reward: ["Reward", "奖励"], length_tokens: ["Tokens", "词元"], before: ["Previous", "上一页"], next: ["Next", "下一页"],
  no_rollouts: ["No completions were recorded yet (or tracking.save_rollouts is off).", "还没有记录回答（或 tracking.save_rollouts 已关闭）。"],
  prompt: ["Prompt", "提示"], completion: ["Completion", "回答"], advantage: ["Advantage", "优势"], tokens: ["Tokens", "词元"], finish: ["Ended", "结束"], cut: ["cut", "截断"], eval: ["evaluation", "评估"],
  group: ["Group", "组"], ground_truth: ["Ground truth", "标准答案"], through_run: ["This prompt through the run: {n} step(s)", "此提示贯穿运行：{n} 步"], arithmetic: ["Arithmetic", "计算"], mean: ["mean", "均值"], deviation: ["deviation", "标准差"],
  no_rewards: ["No completion has a reward.", "没有回答得到奖励。"], no_signal: ["All rewards are the same: this group gives no gradient.", "所有奖励相同：该组没有梯度。"], not_trained: ["An evaluation: nothing was trained on it.", "评估：未用于训练。"],
  formula_z: ["Advantage A = (reward − mean) / deviation", "优势 A =（奖励 − 均值）/ 标准差"], formula_centred: ["Advantage A = reward − mean", "优势 A = 奖励 − 均值"], formula_others: ["Advantage A = reward − mean of the others", "优势 A = 奖励 − 其余的均值"], formula_reward: ["Advantage A = reward", "优势 A = 奖励"],
  formula_computed: ["The algorithm, asked again with the recorded rewards, gives the advantages that were recorded:", "算法用记录的奖励重新计算，得到的优势与记录一致："],
  baseline_scale: ["A = (reward − {baseline}) / {scale} in this group", "本组中 A =（奖励 − {baseline}）/ {scale}"],
  formula_other: ["The recorded advantages follow from no simple formula of these rewards: the algorithm shapes or normalises them further (see Config, Equation).", "记录的优势不是这些奖励的简单函数：算法还做了塑形或归一化（见配置页的公式）。"],
  n_tokens: ["{n} tokens", "{n} 词元"], turns: ["{n} turns", "{n} 轮"], ended: ["Ended", "结束"], prompt_through: ["One prompt through the run", "一个提示贯穿整个运行"],
  colour_by: ["Colour by", "着色依据"], by_advantage: ["advantage", "优势"], by_ratio: ["ratio", "比率"], by_entropy: ["entropy", "熵"], by_gap: ["gap to the engine", "与引擎的差"], by_reference: ["log-ratio to the reference", "与参考的对数比"], by_share: ["share of the group's loss", "占组损失的比例"],
  by_logprob: ["log-prob", "对数概率"], by_rollout_logprob: ["engine's log-prob", "引擎的对数概率"], by_ref_logprob: ["reference's log-prob", "参考的对数概率"], by_value: ["value", "价值"], by_gradient: ["gradient", "梯度"], by_loss: ["loss", "损失"],
  prompt_tokens: ["Prompt as tokenised: {n} tokens", "分词后的提示：{n} 个词元"], no_numbers_here: ["No numbers of these tokens were recorded; of this step there are those of", "没有记录这些词元的数值；本步有记录的是"], group_n: ["group {n}", "第 {n} 组"], no_numbers: ["No numbers of these tokens were recorded (tracking.tokens).", "没有记录这些词元的数值（tracking.tokens）。"], scale_of: ["strongest colour: {n}", "最深颜色：{n}"], n_clipped: ["{n} clipped", "{n} 个被裁剪"], n_masked: ["{n} masked", "{n} 个被屏蔽"], clipped: ["clipped", "被裁剪"], masked: ["masked: not trained on", "被屏蔽：不参与训练"], strip: ["{name} by place", "{name}（按位置）"], tokens_keys: ["Tokens: arrow keys go from one to the next", "词元：方向键逐个移动"],
  mean_of_seeds: ["{name}: mean [least, largest] over seeds {seeds}", "{name}：种子 {seeds} 的均值 [最小, 最大]"],
  judged_accuracy: ["Held-out accuracy", "留出准确率"], "judged_accuracy, best": ["At best", "最好时"], "judged_held-out loss": ["Held-out loss", "留出损失"], "judged_held-out loss, best": ["At best", "最好时"], judged_reward: ["Reward", "奖励"], judged_margin: ["Margin", "间隔"], judged_loss: ["Loss", "损失"], judged_length: ["Length", "长度"], judged_entropy: ["Entropy", "熵"], "judged_seconds/step": ["Seconds a step", "每步秒数"],
  config_differs: ["Where their configs differ", "配置的不同之处"], config_partial: ["Keys that only some of them have, as of another version: {n}", "只有部分运行才有的键（版本不同）：{n}"], nothing_differs: ["Nowhere.", "没有不同。"], over_seeds: ["Mean and range over seeds", "按种子取均值与范围"],
  starting: ["Starting…", "启动中…"], started_as: ["{name} is starting (process {process}); it appears under Runs.", "{name} 正在启动（进程 {process}），会出现在运行列表。"], check: ["Check", "检查"],
  valid: ["A valid config: {kind}, {steps} steps of {updates} update(s).", "配置有效：{kind}，{steps} 步，每步 {updates} 次更新。"], launch: ["Launch", "启动"],
  form: ["Form: the keys that most runs set", "表单：大多数运行会设置的键"], form_hint: ["Values are as in YAML; an empty field leaves the key out, and shows its default. A change writes the config below anew, without its comments.", "值按 YAML 书写；留空则不写此键，并显示默认值。修改会重写下面的配置（注释不保留）。"],
  plan: ["Plan", "计划"], make_plan: ["Will it fit?", "能放得下吗？"], planning: ["Reading data and shapes…", "读取数据与形状…"], plan_fits: ["It fits, as far as shapes tell (the figures say of what).", "按形状估算放得下（数字见下）。"], plan_does_not_fit: ["It does not fit.", "放不下。"], plan_failed: ["There is no plan:", "无法给出计划："],
  study: ["Study", "调参"], studies: ["Studies", "调参"], study_of: ["{metric}, the larger the better; means of {n} values at the end", "{metric}，越大越好；取末尾 {n} 个值的均值"], study_runs: ["No verdict yet: the finals on fresh seeds are still to come.", "尚无结论：还需在新种子上决赛。"],
  show_trials: ["list their trials", "列出其试验"], trials: ["Trials", "试验"], trial: ["Trial", "试验"], trials_counted: ["{n} trials: {complete} whole, {pruned} ended early, {fail} failed, {running} running.", "{n} 个试验：{complete} 个完成，{pruned} 个提前结束，{fail} 个失败，{running} 个运行中。"], best_trial: ["The best is trial {n} with {value}.", "最好的是试验 {n}：{value}。"],
  trials_said: ["{n} trials between {low} and {high}", "{n} 个试验，值在 {low} 到 {high} 之间"], importance: ["What decides", "什么起决定作用"], too_few_trials: ["Too few whole trials to say.", "完成的试验太少，无法判断。"], finals: ["On fresh seeds", "新种子上的决赛"], no_finals: ["Not yet: the best trials and the config as it is are run on fresh seeds at the end.", "尚未进行：最后会在新种子上比较最好的试验与原配置。"],
  as_it_is: ["the config as it is", "原配置"], history_slices: ["History, and each key by itself", "历史与各键切片"], history: ["Value by trial, and the best so far", "各试验的值与当前最好"], largest_is_best: ["the large ringed one is the best", "带圈的大点为最好"], value_of: ["Value", "值"], seconds: ["Took", "用时"],
  complete: ["whole", "完成"], pruned: ["ended early", "提前结束"], fail: ["failed", "失败"], waiting: ["waiting", "等待"],
  first_difference: ["Where two of them begin to differ", "两个运行从哪里开始不同"], find_it: ["Find it", "查找"], all_the_same: ["All that both recorded is the same.", "两者记录的内容完全相同。"], differs_first: ["The first difference: {part} at step {step}.", "第一处不同：第 {step} 步的 {part}。"], differs_before: ["They differ before the first step, and in no step that both have.", "第一步之前就不同，共有的步中没有不同。"], its_step: ["that step of {name}", "{name} 的该步"],
  answers: ["Held-out answers beside each other", "留出集回答对照"], no_answers: ["None of them kept completions of an evaluation.", "没有保存评估的回答。"], only_differing: ["only where rewards differ", "只看奖励不同的"], n_prompts: ["{n} prompts", "{n} 个提示"], all_answers_alike: ["No prompt was rewarded differently.", "没有奖励不同的提示。"],
  n_dropped: ["{n} dropped", "丢弃 {n} 轮"], dropped_by: ["Turn {turn}: no longer seen by the model from turn {by} on", "第 {turn} 轮：从第 {by} 轮起模型不再看到"],
  verdict_error: ["Ended by an error at step {step} of {steps}: {error}", "在第 {step} / {steps} 步因错误结束：{error}"], where_it_failed: ["Where:", "位置："],
  command_hint: ["The same from a terminal, with the config saved under this name:", "将配置存为此文件名后，在终端中等效于："], reply: ["Reply", "回复"],
  // Overview, rollouts, the list of runs, the manual.
  verdict_silent: ["Nothing was written for {time}; a step takes {pace}. It stands still, or it evaluates or saves for long.", "已有 {time} 没有写入任何内容，而每步需 {pace}：可能停住了，也可能正在长时间评估或保存。"],
  run_gone: ["This run's folder is gone. What is shown here was read before.", "此运行的文件夹已不存在，以下是之前读到的内容。"],
  held_out_reward: ["Held-out reward", "留出奖励"], held_out_loss: ["Held-out loss", "留出损失"], training_reward: ["Training reward", "训练奖励"], training_loss: ["Training loss", "训练损失"],
  held_out_hint: ["On data that is not trained on", "在未用于训练的数据上"], reward_hint: ["Mean reward of the completions of a step", "一步中所有回答的平均奖励"], tokens_hint: ["Prompts and completions that went through the trainer", "经过训练器的提示与回答"],
  all_sources: ["all sources", "全部数据源"], at_step: ["at step {step}", "第 {step} 步"], best_at: ["best {value} at step {step}", "最好 {value}（第 {step} 步）"], time: ["Time", "用时"], a_step: ["{time} s a step", "每步 {time} 秒"], a_second: ["{n} a second", "每秒 {n}"],
  best_checkpoint: ["Best checkpoint", "最佳检查点"], newest_checkpoint: ["Newest checkpoint", "最新检查点"],
  about_finding: ["What it means and what helps", "含义与对策"], what_it_writes: ["What the model writes", "模型在写什么"], n_completions: ["{n} completions", "{n} 条回答"], mean_reward: ["mean reward {value}", "平均奖励 {value}"], live: ["live", "实时更新"],
  newest_hint: ["the first of this step, one of each prompt", "本步最前面的，每个提示一条"], worst: ["Worst", "最差"], worst_hint: ["lowest reward of this step, one of each prompt", "本步奖励最低的，每个提示一条"], none_worse: ["All completions of this step earned {value}: none is worse than another.", "本步所有回答的奖励都是 {value}，没有更差的。"],
  nothing_written: ["(nothing)", "（空）"], advantage_hint: ["Advantage: how much more this completion earned than others of its prompt, as the algorithm scales it; its tokens are made more (above 0) or less likely", "优势：此回答比同一提示的其他回答多得多少（按算法缩放）；大于 0 则提高其词元的概率，小于 0 则降低"],
  cut_hint: ["Cut off at rollout.max_completion_tokens", "在 rollout.max_completion_tokens 处被截断"], truncated: ["Truncated", "被截断"],
  before_after: ["Before and after", "前后对比"], before_after_hint: ["one prompt at the first and at the newest step that had it", "同一提示在最早和最新一步的回答"], which_prompts: ["Which prompts", "哪些提示"], change_all: ["All prompts", "全部"], change_better: ["Better", "变好"], change_worse: ["Worse", "变差"], change_same: ["Same reward", "奖励不变"],
  prompts_of: ["Prompts of", "提示来自"], split_eval: ["evaluation", "评估"], split_train: ["training", "训练"], nth_of: ["{n} of {of}", "第 {n} / {of} 个"], every_step_of_prompt: ["This prompt at every step", "此提示的每一步"], at_first: ["Before", "之前"], at_last: ["After", "之后"], and_more: ["and {n} more", "另有 {n} 条"],
  silent: ["last sign", "上次写入"], silent_hint: ["The process is there, but has written nothing for longer than ten of its steps", "进程还在，但超过十步的时间没有写入"], died: ["Died without an error message: killed, or out of memory", "没有留下错误信息就结束了：被杀死或内存不足"], from_scratch: ["from scratch", "从零训练"],
  duration: ["Duration", "用时"], loss: ["Loss", "损失"], kind_accuracy: ["accuracy", "准确率"], kind_reward: ["reward", "奖励"], kind_loss: ["loss", "损失"],
  col_status_hint: ["Failed, silent and ill runs first, then those that run", "失败、无动静、有错误的在前，然后是运行中的"], col_name_hint: ["Folder of the run", "运行的文件夹"], col_model_hint: ["Where the weights come from", "权重来源"], col_algorithm_hint: ["What it is trained with", "训练算法"], col_progress_hint: ["Steps made, of those planned", "已完成步数 / 计划步数"], col_duration_hint: ["Time spent in steps", "各步用时之和"],
  col_loss_hint: ["Training loss, of runs that learn from given data", "训练损失（从给定数据学习的运行）"], col_reward_hint: ["Mean reward of a step's completions", "一步中回答的平均奖励"], col_held_out_hint: ["On data that is not trained on, at the newest evaluation", "最新评估在未训练数据上的结果"], col_started_hint: ["When it was started", "启动时间"],
  newest: ["Newest", "最新"], all_steps: ["All steps", "全部步"], step_hint: ["A step, or a range such as 10-20", "一步，或 10-20 这样的范围"], previous_step: ["Previous step", "上一步"], next_step: ["Next step", "下一步"], text_hint: ["of prompt or completion", "提示或回答中的文字"], more_filters: ["More filters", "更多筛选"], one_prompt_only: ["Only one prompt is shown.", "只显示一个提示。"], mixed_hint: ["Groups whose completions earned different rewards: only these teach anything", "组内回答的奖励不同：只有这些组提供学习信号"],
  rollouts_hint: ["A row is a completion. Those of one prompt in one step are a group; a click shows the group, and how its rewards become advantages.", "每行是一条回答。同一步中同一提示的回答为一组；点击可查看该组以及奖励如何变为优势。"], no_rollouts_ever: ["This run learns from given data: it draws no completions.", "此运行从给定数据学习，不生成回答。"],
  col_step_hint: ["The training step", "训练步"], col_prompt_hint: ["Its end", "提示的结尾"], col_completion_hint: ["Its beginning", "回答的开头"], col_advantage_hint: ["Reward against the others of its prompt, as the algorithm scales it", "与同一提示的其他回答相比的奖励（按算法缩放）"], col_tokens_hint: ["Length of the completion", "回答长度"], col_finish_hint: ["stop: it ended by itself; cut: at the limit of tokens", "stop：自行结束；截断：达到词元上限"],
  manual: ["Docs", "文档"], manual_hint: ["The pages of this version, as they were installed.", "当前版本随附的文档。"], manual_english: ["(in English)", "（英文）"], search_pages: ["Search titles", "搜索标题"], manual_pages: ["Guides", "指南"], manual_algorithms: ["Algorithms", "算法"], manual_benchmarks: ["Measurements", "测量"], manual_failures: ["What the doctor finds", "诊断能发现什么"], about_pages: ["How these pages are read", "如何阅读这些页面"], everywhere: ["Everywhere", "所有页面"],
  run_goes_on: ["A run that is launched goes on when this page or the server is closed.", "启动的运行在关闭本页或服务器后仍会继续。"],
};

export const languages = { en: "English", zh: "中文" };
let column = 0;

export function setLanguage(code) {
  column = code === "zh" ? 1 : 0;
}

export const inChinese = () => column === 1;

/** The words of a key, with `{name}` filled in. */
export function t(key, values = {}) {
  const words = WORDS[key];
  if (!words) return key;
  return words[column].replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}
