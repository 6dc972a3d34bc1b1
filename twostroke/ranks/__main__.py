"""`python -m twostroke.ranks` runs a further rank of a worker; `twostroke.ranks.processes` starts it."""

from twostroke.ranks.rank import main

if __name__ == "__main__":
    main()
