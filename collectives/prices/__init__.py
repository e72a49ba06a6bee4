"""What chips and libraries take, in closed form: the constants that engines are chosen by, and
virtual time counts on.

May import the rest of `collectives` but its ops. Read `hardware` (chips, memories and links),
`library` (what a user has without weft) and `between_hosts` (collectives over several hosts).
"""
