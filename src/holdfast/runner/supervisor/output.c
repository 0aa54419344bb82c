/* Reads the output of the running task from its pipes. It is written in log.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>

#include "clock.h"
#include "files.h"
#include "log.h"
#include "output.h"
#include "spec.h"
#include "task_process.h"

#define FULL_PIPE 256 /* maximum number of chunks in a pipe */
#define READ_PAUSE (2 * MS) /* after a short read: a child that writes byte by byte would otherwise cause a frame per byte */
#define SHORT_READ 4096

/* Read one chunk. Return whether there may be more. */
static bool read_output(int *fd, int stream) {
    static unsigned char room[HEADER + CHUNK];
    if (*fd < 0)
        return false;
    ssize_t n = read(*fd, room + HEADER, output_chunk());
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return errno == EINTR;
    if (n <= 0) {
        close_fd(fd);
        return false;
    }
    running.last_output = boottime();
    running.read_after[stream] = n < SHORT_READ ? running.last_output + READ_PAUSE : 0;
    keep_output(room, stream, (size_t)n, spec.cap);
    return true;
}

bool may_read(int stream) { return boottime() >= running.read_after[stream]; }

void read_outputs(void) {
    if (!copy_has_room()) {
        running.last_output = boottime(); /* it is not idle: it cannot write, because we do not read */
        return;
    }
    if (may_read(OUT))
        read_output(&running.out, OUT);
    if (may_read(ERR))
        read_output(&running.err, ERR);
}

/* Read what is in the pipes. Return false if the copy has no room for all of it yet. */
bool drain_outputs(void) {
    for (int i = 0; i < FULL_PIPE && copy_has_room() && read_output(&running.out, OUT); i++)
        ;
    for (int i = 0; i < FULL_PIPE && copy_has_room() && read_output(&running.err, ERR); i++)
        ;
    return copy_has_room();
}
