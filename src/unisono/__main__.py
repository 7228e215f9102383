from unisono._src.tools.cli import main

main()
