#!/usr/bin/env bash
# Hosts on one machine: namespaces of processes, mounts, IPC, names and networks, joined by a bridge.
#
#   tests/hosts.sh [-n HOSTS] [-r RANKS] [-l LINK] [-e FAULTS] [-t SECONDS] -- ARGUMENTS OF PYTHON
#
#   -n  how many (2)                    -r  ranks on each (2)
#   -l  of each host's link: a rate for `tc tbf`, as 1gbit; nothing: as it is
#   -e  of each link: how many ms later its frames come, and the percentage that is lost, as "200 1";
#       by a switch of our own in place of the bridge (`switch.py`), as not every kernel has `netem`
#   -t  seconds until all is ended (120)
#
# torchrun starts the same program on each. The exit status is the first that is not 0; 77, with the
# reason, where the machine does not allow namespaces.
set -euo pipefail
# Before the folder of the program, where tests/weft could be taken for the package.
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

hosts=2 ranks=2 link= faults= limit=120
while getopts n:r:l:e:t: option; do
    case $option in
        n) hosts=$OPTARG ;; r) ranks=$OPTARG ;; l) link=$OPTARG ;;
        e) faults=$OPTARG ;; t) limit=$OPTARG ;;
        *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))

tag=weft$$
skip() { echo "skipped: $1" >&2; exit 77; }
[ "$(id -u)" = 0 ] || skip "network namespaces are made by root alone"
for tool in ip unshare tc; do command -v $tool >/dev/null || skip "there is no $tool"; done
unshare --pid --fork --mount --mount-proc --uts --ipc true 2>/dev/null || skip "unshare is refused"

declare -a running=()
finish() {
    for pid in "${running[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    for ((i = 0; i < hosts; i++)); do ip netns del $tag-$i 2>/dev/null || true; done
    ip netns del $tag-b 2>/dev/null || true
}
trap finish EXIT
trap 'exit 143' TERM INT

# The bridge is in a namespace of its own, so that nothing is left on the machine's network.
ip netns add $tag-b 2>/dev/null || skip "ip netns is refused"
declare -a names=()
for ((i = 0; i < hosts; i++)); do
    names+=("$tag-$i")
    ip netns add $tag-$i
done
if [ -n "$faults" ]; then
    [ -w /dev/net/tun ] || skip "there is no /dev/net/tun"
    # shellcheck disable=SC2086 # two words
    exec 3< <(exec "${PYTHON:-python}" "$root/tests/switch.py" $faults "${names[@]}")
    running+=($!)
    read -r _ <&3 || skip "the devices of a switch are refused"
else
    ip -n $tag-b link add bridge type bridge 2>/dev/null || skip "there are no bridges"
    ip -n $tag-b link set bridge up
fi
for ((i = 0; i < hosts; i++)); do
    if [ -z "$faults" ]; then
        ip -n $tag-$i link add net type veth peer name port$i netns $tag-b
        ip -n $tag-b link set port$i master bridge up
    fi
    ip -n $tag-$i addr add 10.77.0.$((i + 1))/24 dev net
    ip -n $tag-$i link set net up
    ip -n $tag-$i link set lo up
    if [ -n "$link" ]; then
        tc -n $tag-$i qdisc add dev net root tbf rate "$link" burst 256kb latency 50ms
    fi
done

for ((i = 0; i < hosts; i++)); do
    # A process that is killed takes those of its namespace with it.
    WEFT_NODE=$i GLOO_SOCKET_IFNAME=net NCCL_SOCKET_IFNAME=net \
        timeout -k 5 "$limit" ip netns exec $tag-$i \
        unshare --pid --fork --kill-child --mount --mount-proc --uts --ipc \
        sh -c 'hostname host$WEFT_NODE && exec "$@"' sh "${PYTHON:-python}" -m torch.distributed.run \
        --nnodes "$hosts" --nproc-per-node "$ranks" --node-rank $i --master-addr 10.77.0.1 \
        --master-port 29400 "$@" &
    running+=($!)
done
status=0
for pid in "${running[@]: -hosts}"; do
    wait "$pid" || { code=$?; [ $status != 0 ] || status=$code; }
done
exit $status
