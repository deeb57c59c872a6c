"""`python -m zoo`: the same as `zoo`."""

from zoo.common.search_path import drop_working_directory

if __name__ == "__main__":
    drop_working_directory()
    from zoo.cli import main

    main()
