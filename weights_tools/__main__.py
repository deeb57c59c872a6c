"""`python -m weights_tools`: the same as `weights-tools`."""

from zoo.common.search_path import drop_working_directory

if __name__ == "__main__":
    drop_working_directory()
    from weights_tools.cli import main

    main()
