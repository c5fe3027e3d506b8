#!/bin/sh
# Tells gobgpd what is in table 83: first what is there, then what changes.
{ ip route show table 83 | sed 's/$/ table 83/'; exec ip -o monitor route; } | while read -r line; do
  set -- $line
  case $line in
    "Deleted blackhole "*" table 83"*) gobgp global rib del "$3/32" ;;
    "blackhole "*" table 83"*) gobgp global rib add "$2/32" origin igp ;;
  esac
done
