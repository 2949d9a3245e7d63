"""`python -m localspec`."""

from localspec._entry import main

main()
