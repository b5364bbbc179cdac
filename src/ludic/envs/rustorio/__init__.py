"""Rustorio: a factory game whose rules are Rust's types, played by writing programs."""

from ludic.envs.rustorio.env import RustorioEnv as RustorioEnv
