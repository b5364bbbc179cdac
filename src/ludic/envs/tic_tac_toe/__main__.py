"""`python -m ludic.envs.tic_tac_toe`: play a game by hand."""

from ludic.envs.tic_tac_toe.env import main

raise SystemExit(main())
