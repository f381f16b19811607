"""`python -m trainingcxl`: the command line."""

from trainingcxl.cli import main

if __name__ == "__main__":
    main()
