"""What the terminal chat says by itself, in both languages."""

from __future__ import annotations

from finetune.runtime.language import Text

GREETING: Text = {
    "en": "{model} · /help lists the commands, /quit leaves",
    "zh": "{model} · /help 列出命令，/quit 退出",
}
HOW_TO_LEAVE: Text = {"en": "/quit leaves", "zh": "/quit 退出"}
STOPPED: Text = {"en": "stopped", "zh": "已停止"}
CUT: Text = {
    "en": "cut: the answer has as many tokens as it may have (--max-new-tokens, or the model's context)",
    "zh": "回答已截断：token 数达到上限（--max-new-tokens 或模型的上下文长度）",
}
FORGOTTEN: Text = {"en": "the conversation is forgotten", "zh": "对话已清空"}
NO_SYSTEM: Text = {"en": "no system prompt", "zh": "没有系统提示"}
SYSTEM_SET: Text = {
    "en": "system prompt set; the conversation begins anew",
    "zh": "系统提示已设置，对话重新开始",
}
SAVED: Text = {"en": "saved {turns} turns to {path}", "zh": "已将 {turns} 轮对话保存到 {path}"}
LOADED: Text = {"en": "loaded {turns} turns from {path}", "zh": "已从 {path} 读入 {turns} 轮对话"}
NO_ANSWER: Text = {"en": "no answer yet", "zh": "还没有回答"}
STATS: Text = {
    "en": "last answer: {prompt} prompt tokens, {generated} generated in {seconds:.1f} s ({rate:.1f} tokens/s), "
    "first after {first:.2f} s\n"
    "all {answers} answers: {tokens} tokens in {all_seconds:.1f} s\n"
    "context: {used} of {context} tokens",
    "zh": "上一个回答：提示 {prompt} 个 token，生成 {generated} 个，用时 {seconds:.1f} 秒（每秒 {rate:.1f} 个），"
    "首个 token 在 {first:.2f} 秒后\n"
    "全部 {answers} 个回答：{tokens} 个 token，用时 {all_seconds:.1f} 秒\n"
    "上下文：已用 {used}，共 {context} 个 token",
}
HELP: Text = {
    "en": """/reset            forget the conversation; the system prompt stays
/system [TEXT]    set the system prompt and begin anew; without TEXT: show it
/save FILE        write the conversation to a file
/load FILE        go on with a conversation from a file
/stats            tokens and speed so far
/help             this list
/quit             leave (also Ctrl-D)

Several lines: end a line with a backslash, or put the text between lines of \"\"\".
Ctrl-C stops the answer. A line that begins with // is sent with one slash.""",
    "zh": """/reset            清空对话，保留系统提示
/system [文本]    设置系统提示并重新开始；不带文本时显示当前的
/save 文件        把对话写入文件
/load 文件        从文件继续对话
/stats            到目前为止的 token 数和速度
/help             显示本列表
/quit             退出（或按 Ctrl-D）

输入多行：行尾加反斜杠，或把文本放在两行 \"\"\" 之间。
Ctrl-C 停止回答。以 // 开头的行会去掉一个斜杠后发送。""",
}
