"""A process that reads stretches of a file for an audit: `python -m producer.audit.reader FD`.

It is sent a Wanted and answers with a Part, or with the OSError that kept it from reading, over and over. It ends with
the process that started it: the other end of its connection is closed then, and within a line of many GB it is told.
"""

import sys
from multiprocessing.connection import Connection

from common.parent import end_with_parent
from producer.audit.stretches import part_of


def main(connection: Connection) -> None:
    """Answer until there is nobody who asks."""
    while True:
        answer: object
        try:
            answer = part_of(connection.recv())
        except EOFError:
            return
        except OSError as error:
            answer = error
        try:
            connection.send(answer)
        except OSError:
            return


if __name__ == "__main__":
    end_with_parent()
    main(Connection(int(sys.argv[1])))
