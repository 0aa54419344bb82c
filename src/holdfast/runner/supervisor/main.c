/* holdfast-supervisor FOLDER [--copy] | --launch POOL ROOM | --remove POOL | --kill-user UID | --probe-private
 *
 * Runs the processes of one attempt, so that a worker may die at any time and another worker can adopt the attempt. It enforces
 * the time limits, keeps the output and records the end, all without a worker. There is one supervisor per attempt. On the host
 * it leads its own session; in a container it is PID 1. docs/supervisor.md describes everything in detail.
 *
 *   lock       locked exclusively (flock) while this program lives; others test it with a shared lock
 *   spec       in:  what to run: records of "key length\nbytes\n" after "holdfast-spec 1\n", ended by "end 0\n\n"
 *   stdin      in:  optional; without it the child reads /dev/null
 *   cmd/NAME   in:  commands: the same records after "holdfast-command 1\n"; each is removed, and acknowledged in the log
 *   started    out: JSON, written before the child's program runs; an attempt with this file is never started again
 *   log        out: frames of output and events; their format is in log.c
 *   space/     in and out: the folder `tree`, in which the tasks of a pipeline work, and folders that are to replace it
 *   tmp/       out: the /tmp of a child with a private view
 *   service    out: the output of the service
 *   exit       out: JSON, fsynced, written last and only when no descendant is alive
 *
 * This file has the command line. The main steps of an attempt are in supervise.c, those of a launcher in launcher.c. The head of every
 * other file says what it has. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "attempt.h"
#include "launcher.h"
#include "log.h"
#include "private_view.h"
#include "process_tree.h"
#include "protocol.h"
#include "remove.h"
#include "supervise.h"
#include "text.h"

static int kill_user_command(const char *name) {
    uint64_t uid;
    if (!parse_number(name, UINT32_MAX - 1, &uid) || !uid)
        return exit_with(LEFT_USAGE, "--kill-user needs a uid, and not root's");
    return kill_user((uid_t)uid) ? 0 : exit_with(1, "cannot become that user");
}

int main(int argc, char **argv) {
    bool copy = argc == 3 && strcmp(argv[2], "--copy") == 0;
    if (argc == 3 && strcmp(argv[1], "--kill-user") == 0)
        return kill_user_command(argv[2]);
    if (argc == 2 && strcmp(argv[1], "--probe-private") == 0)
        return probe_private_view();
    if (argc == 4 && strcmp(argv[1], "--launch") == 0)
        return run_launcher(argc, argv);
    if (argc == 3 && strcmp(argv[1], "--remove") == 0)
        return run_remover(argv[2]);
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("holdfast-supervisor " VERSION_TEXT);
        return 0;
    }
    if (argc < 2 || argc > 3 || (argc == 3 && !copy) || argv[1][0] == '-')
        return exit_with(LEFT_USAGE, "usage: holdfast-supervisor FOLDER [--copy]");
    open_standard_descriptors();
    close_inherited(3);
    prepare_supervisor();
    folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return exit_with(LEFT_BROKEN, "cannot open the folder");
    if (chdir("/") < 0) /* do not keep the worker's folder busy */
        return exit_with(LEFT_BROKEN, "cannot enter /");
    if (copy)
        start_copy();
    return supervise();
}
