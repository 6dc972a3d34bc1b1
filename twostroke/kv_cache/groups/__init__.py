"""Page groups: what a pool asks of each of them, and the group of full attention.

page_group     which layers form a group, and how many bytes its pages take
group_pool     the pages of one group: their blocks, holders and writers, and what it reports of them
group_view     what others may see of them
full_group     the group of full attention, which keeps whole chains of blocks
page_state     the states of a page
"""
