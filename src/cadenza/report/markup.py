"""HTML that is safe by construction, see `cadenza.status.markup`."""

from cadenza.status.markup import Html as Html
from cadenza.status.markup import element as element
from cadenza.status.markup import joined as joined
