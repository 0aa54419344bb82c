/* What every part knows about the attempt: its folder, and why it failed. main.c defines these. */
#ifndef ATTEMPT_H
#define ATTEMPT_H

#define TEXT_ROOM 512

extern int folder;              /* the attempt's folder */
extern int lock_fd;             /* its `lock`, held while this program lives */
extern char failure[TEXT_ROOM]; /* what `exit` says as its text */

#endif
