/* Variables that every file uses: the attempt's folder, its lock, and the text of a failure. Defined in main.c. */
#ifndef ATTEMPT_H
#define ATTEMPT_H

#define TEXT_ROOM 512

extern int folder;              /* the attempt's folder */
extern int lock_fd;             /* its `lock`, held while this program lives */
extern char failure[TEXT_ROOM]; /* the `text` of the exit record */

#endif
