"""`python -m zoo`: the same as `zoo`."""

from zoo.cli import main

if __name__ == "__main__":
    main()
