"""The error that a command shows to its user as one line."""


class UserError(ValueError):
  """Something the user gave is wrong; the message is one line, ready to be shown.

  The message names the thing, what was expected of it and what was found. Commands catch this
  class alone, print `error: <message>` to standard error and exit with code 2; every other
  exception is a bug of ours and keeps its traceback.
  """
