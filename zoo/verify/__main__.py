"""`python -m zoo.verify ARCH`: the same as `zoo verify ARCH`."""

from zoo.common.search_path import drop_working_directory

if __name__ == "__main__":
    drop_working_directory()
    import sys

    from zoo.cli import main

    main(["verify", *sys.argv[1:]])
