"""``python -m mindx_elastic``: the console command where its script is not on the PATH."""

from mindx_elastic.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
