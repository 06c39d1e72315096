"""The console script `hf-dspark`: one small module a sub-command, imported when it runs."""
