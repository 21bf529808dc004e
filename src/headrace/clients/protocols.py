"""The protocols that there is a client for, by name, each behind the face of face.py."""

from typing import Final

from headrace.clients import blipmq_face, felix_face, overhop_face, relink_face, zeroctl_face
from headrace.clients.face import Client

# A protocol joins with one entry.
CLIENTS: Final[dict[str, Client]] = {
    "blipmq": blipmq_face.CLIENT,
    "zeroctl": zeroctl_face.CLIENT,
    "felix": felix_face.CLIENT,
    "overhop": overhop_face.CLIENT,
    "relink": relink_face.CLIENT,
}
