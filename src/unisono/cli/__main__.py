from unisono.cli import main

main()
