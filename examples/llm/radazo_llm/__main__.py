"""Starts the command line."""

from radazo_llm.command import radazo_llm as main

if __name__ == "__main__":
    main()
