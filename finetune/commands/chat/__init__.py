"""The `chat` command: questions and answers in a terminal. How an answer is made: inference/."""
