from unisono._src.cli import main

main()
