"""On PYTHONPATH, every optimizer step of a worker takes a second longer, so that something can
happen in between.
"""

import os

if "RANK" in os.environ:
    import time

    from finetune.training.executor import StepExecutor

    original = StepExecutor.run

    def run(*arguments, **options):
        time.sleep(1.0)
        return original(*arguments, **options)

    StepExecutor.run = run
