"""What a run looks like in a browser: `view(folders)`, or the command `ludic view`."""

from ludic.view.server import view as view
