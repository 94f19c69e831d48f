"""A client of the picker's port that sends messages of another protocol: ``babbling.py ADDRESS CA``."""

import sys
import time
from pathlib import Path

import grpc

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PAUSE_SECONDS = 0.2
GARBAGE = b"\xff another protocol"


def babble(address: str, authority: bytes) -> None:
    """Open a call again and again, each with one message that is none of ext_proc's."""
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)) as channel:
        process = channel.stream_stream(PROCESS, None, None)
        while True:
            call = process(iter([GARBAGE]))
            try:
                for _ in call:
                    pass
            except grpc.RpcError as error:
                sys.stderr.write(f"{error.code()}: {error.details()}\n")
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    babble(sys.argv[1], Path(sys.argv[2]).read_bytes())
