"""The house rules that a program can check, for `zoo lint`: arithmetic in the ops alone, imports downwards, files where they belong."""
