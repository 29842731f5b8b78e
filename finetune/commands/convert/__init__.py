"""Converting runs of other tools. What becomes of an option is a row of tables/*.toml; code is for
what several options say together. Nothing here trains or reads data.
"""
