"""The words by which the lines of a log are told apart: steps, errors, restarts, quoted data, other
programs.
"""

from __future__ import annotations

import re

# A loss; or the number of a step with something that was measured in it.
STEP = re.compile(
    r"""(?:\b|_)loss['"]?(?:[/ ](?!scal)\w+){0,2}(?:\s*[:=]\s*|\s+)['"]?-?\d|损失\S{0,2}\s*[:=：]?\s*-?\d"""
    r"|(?i:(?<![a-z])(?:step|iter(?:ation)?|update)s?\W{0,3}\d+\b"
    r".{0,200}\b(?:lr|learning.rate|tok(?:en)?s?/s|samples?/s|reward\w*|g(?:rad)?_?norm|ppl|tflops|mfu|\d"
    r" ?ms)\b)"
)
NOT_A_NUMBER = re.compile(r"\b(?:nan|inf)\b(?! (?:iteration|step|batch|count))", re.IGNORECASE)
FINISHED = re.compile(
    r"^\[SUCCESS\] done: |['\"]?train_runtime['\"]?\s*[:=]|Training completed\. Do not forget to"
    r" share"
    r"|worker group successfully finished|^Training[\w ]*: 100%\|"
    r"|(?<!not )\btraining (?:finished|completed|done) (?:normally|successfully)\b"
)
# Tests, of failures too: how pytest is called or begins, what it prints in the middle, its last
# line, and one of tests that all passed.
TESTS_BEGIN = re.compile(
    r"^=+ test session starts\b|^(?:[$+]+ )?(?:\S*python[\d.]* -m )?pytest(?: +[\w./:-]+)*$"
)
TESTS_RUN = re.compile(r"^collect(?:ed|ing) \d+ items?\b|^\S+\.py::\S+ (?:PASS|FAIL|ERROR|SKIP)")
TESTS_ENDED = re.compile(
    r"^(?:=+ )?(?:\d+ \w+, )*\d+ (?:passed|failed|errors?|skipped)\b.* in [\d.]+s\b"
)
TESTS_PASSED = re.compile(r"^(?!.*\b(?:failed|errors?)\b).*\b\d+ passed\b")
# The same as other trainers say it, and scripts that do not look. What stands around these words
# may deny it.
_NOT_BADLY = r"(?! (?:\w+ing\b|with (?:err|fail|ex)|un|ab|by\b|prem|early|due|because))"
TRAINED = re.compile(
    r"(?i:\b(?:training|fine-?tuning)(?: run| job)?(?: is| was| has)?"
    r" (?:completed?|done|finished|ended|over)\b"
    rf"{_NOT_BADLY}|\btrain\w*(?:[\]:]| ) {{0,3}}(?:all"
    rf" )?(?:done|completed?|finished)\b{_NOT_BADLY}"
    r"|^(?:total )?training time:? \d|^(?:all )?done (?:in|after) \d"
    r"|\b(?:done|finished|completed|end of)(?: with)? training\b|\bmax_\w+(?:=\d+)?`? (?:was"
    r" )?reached|reached max_"
    r"|\b(\d+) ?(?:of|/) ?\1 (?:step|epoch|iter)\w*|\b\d+ (?:steps|epochs|iterations)"
    r" (?:done|finished|completed)\b"
    r"|\b(?:finished|completed)(?: all)? \d+ (?:steps|epochs|iterations)\b"
    r"|\b(?:saved|wrote|written)\b.{0,200}[/ ]final\b(?! checkpoint)"
    r"|\bfinal (?:model|weights)\b.{0,200} (?:in|to|saved|written)\b)"
    r"|train_runtime['\"]?\s*[:=]|训练\S{0,6}(?<!异常)(?:完成|结束|成功)"
)
DENIED = re.compile(
    r"\b(?i:not|fail\w*|errors?|unable|cannot|abort\w*|before|until|unless|if|when|will)\b|n't\b|失败|未|异常"
)
# Said by a process, or by who started it.
ENDED_WELL = re.compile(
    r"(?i:\b(?:exit(?:ed|s|ing)?|return|left|leav(?:es|ing)|ended|status|rc)(?: with)?(?: code|"
    r" status)?[:= (]{1,3}0\b"
    r"|退出码\W{0,2}0\b|^(?:all (?:(?:evaluation|epoch|step|task|experiment)s"
    r" )?)?(?:done|complete|finished)\b"
    r"|\b(?:(?:finished|completed|exits) successfully|successfully"
    r" (?:finished|completed))\b|JobSucceeded\b"
    r"|\b(?:job|run|attempt|task|status)\b.{0,12}\b(?:succeeded|success|finished|completed)\b"
    r"|\bsuccess(?:ful)? after \d"
    r"|^(?:evaluation|benchmark|inference|generation|export|conversion|upload|download|preprocessing|merg(?:e|ing))"
    r"(?: is| was)? (?:finished|done|completed?|ok)\b(?! with))"
    r"|reason: Completed\b|State[=:] ?COMPLETED\b"
)
# What the last line of a program says that has done its work: what it made and where, what it
# measured, that it serves.
RESULT = re.compile(
    r"(?i:\b(?:saved|written|wrote|uploaded|exported|stored)\b.{0,60}?(?:\s|^|/|=|:)\S*[/.]\w"
    r"|(?<![-\w])(?:results?|report)\b.{0,20}\b(?:in|to|at) \S*[/.]\w"
    r"|\b(?:pass@\d+|accuracy|acc|exact_match|recall(?:@\d+)?|f1|score|bleu|rouge\w*|throughput|tflops?|tokens/s"
    r"|tok/s)\b\W{0,6}(?:is |of |= ?)?\d|\d (?:tflops?|tflop/s|tok/s|tokens/s)\b"
    r"|^(?:ok|bye|done|success|passed|200)[.!]?$|\b(?:completed|finished|done) in \d|_SUCCESS\b"
    r"|\bexit(?:ed)?(?: with)?(?: code| status)?[:= ]*0\b|\blistening on http|\ball slots are"
    r" idle|\btotal time *=)"
)
NO_RESULT = re.compile(
    r"(?i:\b(?:errors?|fail(?:ed|ure|s)?|exception|traceback|abort\w*|killed|unable|cannot|can't|could"
    r" not|not found"
    r"|denied|refused|timed? ?out|exit(?:ed)?(?: with)?(?: code| status)?[:= ]*[1-9]|giving"
    r" up|crash\w*|core dumped"
    r"|backoff|core file|dump)\b)|offline-run|Find logs"
)
PROMPT = re.compile(r"^(?:\S*[\w)\]~][^\w\s]*)?\s*[$#>%]\s*$|^[\W_]*$")
# A new start, or something that was got over: what came before counts only where nothing after it
# failed by itself.
RESTART = re.compile(
    r"will restart worker group|\bSuccessfully assigned \S+ to \S|\[(?:INFO|WARNING)\] (?:starting"
    r" again|restart)"
    r"|(?i:\bresum(?:ing|ed) (?:\w+ )?from\b|\brestart count [1-9]|\b(?:attempt|try|retry)"
    r" [2-9]\b(?!/\d+\]|.*fail)"
    r"|\b(?:connection|link|service|server \S+) (?:was |is )?(?:restored|recovered|up again|OK\b)"
    r"|(?<!found, )\b(?:using|going on with) \S+(?: instead)?$"
    r"|\brestart(?:ing|ed) (?:the )?(?:engine|worker|server|process|job)\b)"
)
SUMMARY_RANK = re.compile(r"^ +rank +: (?P<rank>\d+) \(local_rank: \d+\)")
OWN_WHERE, OWN_FIX = "  where: ", "  fix:   "
# A diagnosis that the launcher wrote into the log, in any language: it quotes lines and speaks of
# other causes.
DIAGNOSIS_TITLE = re.compile(r"^\d+\. \w+(?:  \(.+ [01]\.\d\d\)|（.+ [01]\.\d\d）)$")
DIAGNOSIS_LINE = re.compile(r"^ {3}\S")
FRAME = re.compile(r'^\s+File ".*", line \d+')
RAISES = re.compile(r"^\s+(?:raise|assert) ")  # source code that is quoted under a frame
AT_POSITIONS = re.compile(r"^\s+\S.*\bpos(?:ition)?_embed")
BOILERPLATE = re.compile(r"Possible Cause:|Solution:")
LEAVES_BOILERPLATE = re.compile(
    r"^\s+TraceBack |^\[?(?:ERROR|INFO|WARNING|W|E)\b|^\[PID:"
    r" |^E[A-Z0-9]\d\d\d\d\b|^\S*Error\b|^Traceback "
)
_BEFORE_LEVEL = r"^(?:(?!\S*(?:ERROR|CRITICAL|FATAL|NCCL|Error|Exception))\S+ ){0,4}[\[(]?"
_EXCEPTION_NAME = r"\w(?:Error|Exception|Timeout)\b"
_SKIPPED = (
    r"(?:^skip \S|(?<!not )(?<!be )\b(?i:skipp(?:ed|ing)|ignor(?:ed|ing)|retrying|will"
    r" retry|fall(?:ing|s|en)? back"
    r"|us(?:ing|es) (?:the )?(?:default|reference|fallback)|recovered)\b)"
)
_CAUGHT = rf"(?:{_SKIPPED}|(?<!not )(?<!un)(?i:\bcaught|\bhandled)\b)"
# Not a line that begins with the exception, as the end of a traceback does, nor one that says that
# this is the end.
_GOES_ON = (
    rf"^(?![\w.]*{_EXCEPTION_NAME}|.*\b(?i:exiting|abort\w*|terminat\w*|giving up|gave up|fatal))"
)
QUIET_LEVEL = re.compile(
    rf"{_BEFORE_LEVEL}(?:INFO|WARN(?:ING)?|DEBUG)(?=[\]:|,) -])"
    rf"|{_GOES_ON}(?=.*{_SKIPPED}).*{_EXCEPTION_NAME}"
    r"|^\[?[IWD]\d{3,4} \d\d:\d\d:|\[(?:INFO|DEBUG|WARNING|SUCCESS|NOTICE|TRACE)\]|\bNCCL INFO\b"
    r"|[ |](?:INFO|WARNING|DEBUG) *(?:-|\|)|^(?:INFO|WARNING|DEBUG)[: ]|\b\w*Warning:"
    r" |(?i:\bwarning: )|\[warn\]"
    r"|thrown while requesting [A-Z]+ |\[notice\]|retry loop|will retry|[Rr]etrying\b"
    r"|(?i:\b(?:re)?try|attempt) (\d+) ?(?:of|/) ?(?!\1\b)\d+\b"
    r"|[Cc]onsider installing|[Ff]alling back to"
    r"|pip's dependency resolver|but you have \S+ \S+ which"
    # commands, repeated
    r"|^(?:\$|\++) (?=[\w./-])|^(?:#\d+ (?:\[[^\]]*\] )?|Step \d+/\d+ : )RUN\b"
    # And what was done about an error.
    r"|(?:->|=>|→) ?(?:dropp|skipp|ignor|discard)(?:ed|ing)\b|^(?i:skipp|ignor)ing\b"
    r"|[.,;:(] ?(?:[Ss]kipp(?:ed|ing)|[Ii]gnor(?:ed|ing)|[Cc]ontinuing|[Rr]ebuilding)"
    r"(?: (?!is\b|of\b)[\w ]{1,30})?[.)]*$"
    # And the reason behind it.
    r"|\b(?:skipped|ignored|dropped|discarded) \([\w.]*(?:Error|Exception)\b"
)
# In a line of that level: an exception that was dealt with.
HANDLED = re.compile(rf"{_GOES_ON}(?=.*{_CAUGHT}).*{_EXCEPTION_NAME}")
# A server that answered a request for work (not for its health), or makes tokens.
SERVED = re.compile(
    r"\"POST /\S* HTTP/[\d.]+\"?,? 2\d\d\b|generation throughput: (?!0\.0\b)\d|gen throughput"
    r" \(token/s\): [1-9]"
)
# A text that is longer than what the model was made for, counted in tokens.
TOO_LONG = re.compile(
    r"sequence length is longer than the specified maximum sequence length for this model "
    r"\((?P<tokens>\d+) > (?P<limit>\d+)\)"
)
UNLIKE_SIZES = re.compile(
    r"size of tensor a \((?P<tokens>\d+)\) must match the size of tensor b \((?P<limit>\d+)\) at "
    r"non-singleton dimension (?P<dimension>\d)"
)
EXCEPTION = re.compile(
    r"^(?P<exception>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Expired|NotFound|Group)"
    r"|Exception)"
    r"(?::|$)"
)
# Exceptions that end a process because something else did.
CASCADE_EXCEPTIONS = re.compile(
    r"(?:ChildFailedError|SignalException|SystemExit|BrokenPipeError|GeneratorExit|ProcessExitedException"
    r"|CalledProcessError|ProcessRaisedException)(?::|$)|The Inner error is reported as above"
    r"|(?:NPU|HCCL|OPS|GRAPH) function error|HCCL error in|ACL stream synchronize failed"
    # Their reason is in other lines of the same process.
    r"|because of the following error|^\w+: Caught \w+ in |DatasetGenerationError(?::|$)"
)
# What ends a traceback, whatever its name: classes of modules, and names of two words or more.
ENDS_TRACEBACK = re.compile(
    r"^(?:[A-Za-z_]\w*\.)+_?[A-Z]\w*(?::\s|:?$)|^[A-Z][a-z]+[A-Z]\w+(?::\s|:?$)|^Unsupported: "
)
# A call that failed, and the number that it returned: why is said by other lines of the same
# process, if by any.
CODE_ONLY = re.compile(
    r"(?:NPU|HCCL|OPS|GRAPH) function error|error code(?: is|:) ?\(?\d+\)?\W*$|call (?:acl|hccl)"
    r" api failed"
    r"|^RuntimeError: (?:HCCL|NPU|ACL) error\b"
)
IGNORED = re.compile(
    r"^Exception ignored in|^--- Logging error ---|^Exception in thread (?!MainThread)"
)
# Others begin a line like ours with a time, a module or a file.
OWN_ERROR = re.compile(r"^\[ERROR\] (?:rank \d+: )?(?P<error>(?!20\d\d-|[A-Z]+\(|\[)\S.*)")
FAILURE = re.compile(
    r"^\[?F\d{3,4} \d\d:\d\d:|^Segmentation fault|^Fatal Python error|core"
    r" dumped|^Aborted|^terminate called"
    r"|^Bus error|^\S+: error: "
    r"|^bash: .*(?:not found|denied)|^\S+: can't open file|^srun: error: .*[Ee]xited|^ +exitcode +:"
    r" -?[1-9]"
    r"|^(?:the )?(?:train\w* )?(?:script|job|program|command)"
    r" (?:returned|terminated|exited|ended)(?: with)?(?: a)? "
    r"(?:non-zero )?(?:exit )?(?:status|code)\W{1,3}[1-9]\d*\W*$"
    r"|exits with return code = -?[1-9]|\bERR\d\d\d\d\d\b|\bE[A-Z0-9]\d\d\d\d(?::|\))|failed"
    r" \(exitcode: -?[1-9]"
)

# An error that comes from the one before it, which is only where it began.
CHAINED = re.compile(
    r"^(?:During handling of the above exception|The above exception was the direct cause)"
)
# Ended by the launcher because another process had failed: no news.
FORCED_KILL = re.compile(r"process (?P<pid>\d+) via \S+, forcefully exiting via \S*SIGKILL")
# A task of a Slurm job failed by itself: the others are cancelled because of it.
TASK_FAILED = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: Exited with exit code [1-9]")
# SGLang ends all that it started, and itself, without naming them.
QUIT_ALL = re.compile(r"Received sigquit from a child process")
# Training data, prompts and generated text speak of anything.
CHAT_BEGINS = re.compile(r"<\|(?:im_start|start_header_id|user|system)\|>|\[INST\]|<start_of_turn>")
CHAT_ENDS = re.compile(r"<\|(?:im_end|eot_id|endoftext|end)\|>|\[/INST\]|<end_of_turn>|</s>")
# ``` around a piece of text, a row of a table, and a heading over the lines of an example.
FENCE = re.compile(r"^\W{0,3}(?:```|~~~)[\w+-]*\s*$")
TABLE_ROW = re.compile(r"^[|│┃](?:[^|│┃]*[|│┃]){2,}\s*$")
HEADING = re.compile(
    r"^(?:#{1,4} ?(?:instruction|input|output|response|question|answer|prompt|completion)\b.{0,3}"
    r"|(?:output|response|answer|prompt|completion|prediction|generation)s?:)\s*$"
    # A program under test that failed.
    r"|^\W*(?:task|problem|solution|candidate|answer|sample|completion|test case)\b.{0,60}:"
    r" Traceback \(most recent",
    re.IGNORECASE,
)
DATA = re.compile(
    # Requests of a load test that failed, counted; an agent's conversation with its tools.
    r"^\d+ +(?:GET|POST|PUT|DELETE) /\S*: |"
    r"^\[(?:tool|assistant|user|observation|action|thought|human)\] ?\S|"
    # `[sample 0] answer: ...`, `3/8 | prompt: ...`
    r"^\W*(?:(?:(?:sample|example|case|query|item|row|generation|test)\W{0,2}\d+|\d+(?:/\d+)?)\W{1,4})?"
    r"(?:(?:sample|example|first|last|next|random|raw|decoded|formatted|rendered|train(?:ing)?|eval(?:uation)?|validation"
    r"|test|user|system|model|chosen|rejected) )?"
    r"(?:instruction|input|output|prompt|completion|response|question|answer|content|text|messages|conversations?"
    r"|generated(?:"
    r" text)?|generation|prediction|reference|target|sample|example|user|assistant|human"
    r"|提示词?|回答|参考|问题|答案|指令|输入|输出|样本|用户|助手|预测)"
    r"(?: ?#?\d+)?[\"']? ?[:=|：].*\w|[\"'](?:role|messages|conversations|instruction)[\"']: "
    # Results of tasks that a program under test failed or did not.
    r"|^\W*(?:tasks?|tests?|problem|case|item)[ _].{0,80} \.\.\."
    r" (?:FAIL|ERROR|ok|PASS)\w*\b|^(?:SFT )?sample: *\{"
    # Questions and answers; a trial of a search, which goes on, or ends with the traceback.
    r"|^[QA]: \S|^(?:\[W [^\]]*\] )?Trial \d+ failed with (?:parameters|value)\b"
    # Quoted text, comments of source code that is printed, templates, and what was looked for and
    # not found.
    r"|^(?:>|#|//) \S|\{\{ ?[$.\w]|[:=] *0"
    r" (?:lines?|times|events?|hits|matches|found|occurrences|errors?)\W*$",
    re.IGNORECASE,
)
# `request 3: prompt: 'why does it say "out of memory"?', params: ...`: what is quoted in it says
# nothing.
QUOTED_DATA = re.compile(
    r"\b((?:(?:prompt|question|answer|quer(?:y|ie)|response|completion|instruction|example|sample|text|content|input"
    r"|output|generated_text|utterance|document|chosen|rejected)s?|提示词?|问题|回答|样本)"
    r"['\"]?\)? ?(?:[:=：]|is|was) ?[rfb]?)"
    r"(?:(['\"`]).*\2|['\"`].*|“[^”]*”?|「[^」]*」?)",
    re.IGNORECASE,
)
# The text in which trl found no response.
QUOTED_INSTANCE = re.compile(
    r"(?<=in the following instance: ).*?(?= This instance will be ignored|$)"
)
# A log without any of these is another program's: what its lines say of disks and connections is
# not about a run.
RUN = re.compile(
    r"(?i:torch|cuda|nccl|hccl|\bnpu|gpu|ascend|deepspeed|accelerate|transformers|tokenizer|safetensors|huggingface"
    r"|wandb|python|finetune|\brank|slurm|srun|\bloss|epoch|DataLoader|gloo|c10d|xla|mpirun|sbatch)"
    r"|Traceback \(most recent|\.py\b|\bERR\d{5}\b|\[Errno"
    r" \d|(?<!\w)E[A-Z0-9]\d{4}\b|\b_?[A-Z]\w*Error\b|OOMKilled"
    r"|std::bad_alloc|^\[(?:ERROR|WARNING|INFO)\] |^the run\b|^(?:ba|z)?sh:"
    r" |exitcode|oom-kill|NVRM|GLIBC"
    r"|^\S+\.sh: line \d"
    r"|^(?:\S+: line \d+: +)?\d* ?Killed\b|Segmentation fault|exited with code 1?3\d|exit code"
    r" 1?3\d"
)
FOREIGN = re.compile(
    r"^\s+at [\w.$]+\(|\[\d+\] (?:\S+ )?(?:LOG|DETAIL|STATEMENT|HINT|FATAL|PANIC): "
    r"|^Error response from daemon:|userland proxy|UNREACHABLE! =>|/var/cache/apt|\bdpkg\b"
    r"|\bjavax?\.\w|\bnpm (?:ERR|error)|nginx|mysqld|postgres|sshd|httpd|\[error\] \d+#\d+:"
)
# Lines of programs that are never the run's own, and of those that watch over it: they count where
# they say what the machine or the scheduler did.
OTHER_PROGRAM = re.compile(
    r"^(?:[\w.-]+"
    r" )?(?:sshd|CRON|crond?|anacron|sudo|su|nginx|httpd|apache2|postgres|mysqld|mariadbd|redis(?:-server)?"
    r"|NetworkManager|chronyd|ntpd|dhclient|rsyslogd|snapd|postfix\S*|named|smbd|zabbix_\w+|puppet\S*|filebeat|telegraf"
    r"|fluentd|prometheus|node_exporter|grafana\S*|avahi-daemon|polkitd|dbus-daemon|auditd|CROND|systemd-(?:resolved"
    r"|logind|networkd|timesyncd|udevd))(?:\(\w+\))?(?:\[\d+\])?: |TBE Subprocess\[\w+\] raise"
    r" error"
    r"|^\d+:(?:signal-handler|[CMSX] \d)"  # Redis
    r"|^.{0,12}\[\d+\] (?:\S+ )?(?:LOG|DETAIL|STATEMENT|HINT|ERROR|FATAL|PANIC): +\S"  # PostgreSQL
)
SERVICE = re.compile(
    r"^(?:[\w.-]+"
    r" )?(?:dockerd|containerd|kubelet|kube-proxy|systemd|podman|crio|etcd|consul|nomad)(?:\[\d+\])?: "
    r"|\w\.go:\d+\] |\blevel=(?:info|warn(?:ing)?|error|fatal)\b"
)

# The stack of the thread in which Python crashed, those of others, and a module of another package
# in it.
CRASHED_THREAD = re.compile(
    r"^(?P<crashed>Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):"
)
PACKAGE_FRAME = re.compile(r'^\s+File ".*?(?:site|dist)-packages/(?P<package>\w+)')
# Progress of data that are made ready before training: `Map (num_proc=8):  56%|█████ |
# 672000/1200000 [09:20<...`.
PREPARING = re.compile(
    r"(?:^|[^\w])(?P<work>(?:Running"
    r" tokenizer|Tokeniz|Map|Filter|Flatten|Group|Pack|Preprocess|Convert|Cast|Appl"
    r"|Truncat|Adding EOS|Extracting prompt|Generating \w+ split|Saving the"
    r" dataset)[^:|%]{0,80}?):? +"
    r"(?P<percent>\d{1,3})%\|"
)

# Innermost frames of code that reads records, in any file or only under a loader or a map; and of
# evaluation that keeps the logits of its batches.
READS_RECORDS = re.compile(
    r"data_collator\.py|, in \w*(?:[cC]ollat|__getitem__|[tT]okeni[sz]e_|preprocess)\w*"
)
UNDER_LOADER = re.compile(
    r"torch/utils/data/|datasets/(?:arrow_dataset|iterable_dataset|utils/py_utils)\.py"
)
OF_A_PACKAGE = re.compile(r"(?:site|dist)-packages/|/lib/python3|<frozen ")
RECORD_ERROR = re.compile(r"^(?P<error>(?:Index|Key|Type|Attribute)Error\b.*)")
EVALUATES = re.compile(
    r", in (?P<function>evaluation_loop|prediction_step|prediction_loop|nested_concat|nested_gather"
    r"|preprocess_logits\w*|gather_for_metrics)\b"
)
# Reading of weights and states by torch.load onto the device that they were saved from.
LOADS_ONTO_DEVICE = re.compile(
    r"torch/serialization\.py.*, in"
    r" (?:_(?:cuda|privateuse1|npu)\w*|default_restore_location|restore_location)\b"
)
# Collecting the whole state of a sharded model or optimizer; parameters are collected for other
# work, too.
GATHERS_STATE = re.compile(
    r", in"
    r" (?P<function>(?:_?get_(?:model_|optim\w*_)?|_?full_(?:optim_)?|_?optim_|_?gather_|consolidate_)state_dict"
    r"(?:_impl)?|_full_(?:pre|post)_state_dict_hook|_(?:zero3_)?consolidated_16bit_state_dict|summon_full_params)$"
)
OF_SAVING = re.compile(r", in \w*save\w*$")
SERVES_HTTP = re.compile(
    r"/(?:uvicorn|hypercorn|gradio|tensorboard|werkzeug|flask|jupyter\w*|notebook|aiohttp|tornado)/|/http/server\.py"
    r"|/socketserver\.py|/entrypoints/(?:openai|api_server|http_server)|/(?:api|http)_server\w*\.py"
)
OF_TORCH_LOAD = re.compile(r"torch/serialization\.py")
# The number of batches that a rank has, or had when it was through with its part.
BATCHES = re.compile(
    r"(?i:\b(?:data ?loader (?:length|size|len)|len\((?:train_?)?(?:data)?loader\)|(?:number"
    r" of|num)[ _]"
    r"(?:train )?batches|batches per epoch)\W{1,4}(?P<length>\d+)\b"
    r"|\b(?:done|finished|completed|ended|exhausted) (?:after|with|at) "
    r"(?P<done>\d+) (?:batch|step|iteration)\w*)"
)

# What tells how to read other lines.
STRUCTURE = (
    *(
        FRAME,
        BOILERPLATE,
        FINISHED,
        TESTS_BEGIN,
        TESTS_RUN,
        TESTS_ENDED,
        TRAINED,
        ENDED_WELL,
        RESTART,
        SUMMARY_RANK,
    ),
    *(
        IGNORED,
        DIAGNOSIS_TITLE,
        FORCED_KILL,
        QUIT_ALL,
        CHAINED,
        CHAT_BEGINS,
        CHAT_ENDS,
        ENDS_TRACEBACK,
        FENCE,
        HEADING,
    ),
    *(DATA, CRASHED_THREAD, PREPARING, BATCHES, RAISES, AT_POSITIONS, SERVED, TOO_LONG),
    re.compile(f"TraceBack|^{OWN_WHERE}|^{OWN_FIX}"),
)
